"""Commands that need more than the base install say so in one line, before they import it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from importlib import metadata
from typing import ParamSpec

from agentrl.types.errors import AgentRLError

P = ParamSpec("P")
# Requirements that hold on some platforms only have a longer marker: the program does without them.
_REQUIREMENT = re.compile(r"""(?P<name>[\w.-]+)[^;]*;\s*extra\s*==\s*["'](?P<extra>[\w-]+)["']""")


def remedy(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'agentrl[{extra}]'"


def missing_packages(extra: str) -> list[str]:
    """Packages of an extra that are not installed, as the install itself names them."""
    found = (_REQUIREMENT.fullmatch(requirement) for requirement in metadata.requires("agentrl") or ())
    wanted = [match["name"] for match in found if match and match["extra"] == extra]
    return [name for name in wanted if not _is_installed(name)]


def needs(extra: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """A command that raises AgentRLError, with the remedy, where an extra is not installed."""

    def decorate(command: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(command)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            if missing := missing_packages(extra):
                raise AgentRLError(
                    f"this command needs the extra '{extra}': {remedy(extra)} (not installed: {', '.join(missing)})"
                )
            command(*args, **kwargs)

        return run

    return decorate


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True
