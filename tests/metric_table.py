"""The table of all metrics, as the project documents it."""

from __future__ import annotations

import re
from pathlib import Path

_TABLE = Path(__file__).parents[1] / "agentrl" / "telemetry" / "README.md"
_WORD = re.compile(r"<[a-z]+>")


def documented_metrics() -> list[str]:
    """Names as the table has them; some with words in angle brackets that stand for any."""
    return re.findall(r"^\| `([^`]+)` \| [^|]+ \| [^|]+ \|$", _TABLE.read_text(), re.MULTILINE)


def undocumented(names: set[str]) -> set[str]:
    """Those of the names that the table lacks."""
    families = ["[a-z_.]+".join(map(re.escape, _WORD.split(name))) for name in documented_metrics()]
    pattern = re.compile("|".join(families))
    return {name for name in names if not pattern.fullmatch(name)}
