"""Plain tables that are wide enough for names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_MIN_COLUMNS = 130
_ENDLESS_COLUMNS = 2000


def wide_console() -> Console:
    """At least as wide as the tables: names that are cut short could not be searched for."""
    from rich.console import Console

    return Console(highlight=False, width=max(_MIN_COLUMNS, Console().width))


def endless_console() -> Console:
    """As wide as any table: a terminal wraps what is too long for it, and nothing is cut."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True, width=_ENDLESS_COLUMNS)


def plain_table(*columns: str) -> Table:
    """A plain table; columns that begin with ``>`` are aligned to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    return table
