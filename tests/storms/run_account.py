"""What a finished run has left, counted by readers of Parquet and JSON that share no code with the product."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

SESSIONS_SUFFIX = ".sessions"
_COMPARED = ("outcome", "reason", "turns", "sampled_tokens")


@dataclass(frozen=True, slots=True)
class RunAccount:
    """What is wrong with what a run has left; a run that is in order has zeros.

    Of the episodes of the ledger `archive_missing` are not in the archive, `archive_doubled` are there more than once
    or without a line, and `archive_differs` have another outcome, reason or number of turns or tokens there.
    `goodput_tokens_lost` were on record and are not in the ledger. `sessions_open` are sessions of environments that
    the last start, which ended in order, has opened and not closed; `temporary_left` what the starts have left in
    their temporary folder.
    """

    archive_missing: int = 0
    archive_doubled: int = 0
    archive_differs: int = 0
    goodput_tokens_lost: int = 0
    sessions_open: int = 0
    temporary_left: int = 0

    def __add__(self, other: RunAccount) -> RunAccount:
        return RunAccount(*(first + second for first, second in zip(astuple(self), astuple(other), strict=True)))


def account_of(run: Path, on_record: Mapping[str, int], sessions: list[str], temporary: Path) -> RunAccount:
    """The account of a run.

    Args:
        run: its folder.
        on_record: sampled tokens that some look at its journal found, by episode.
        sessions: lines ``open INSTANCE`` and ``close INSTANCE`` of its last start.
        temporary: the folder that it had as TMPDIR.
    """
    lines = {line["episode_id"]: {**line, "reason": line["reason"] or None} for line in _ledger(run)}
    rows = _archive(run)
    counts = Counter(row["episode_id"] for row in rows)
    known = [row for row in rows if row["episode_id"] in lines]
    # The archive shows each token as well, and whether a policy drew it.
    drawn = Counter(dict(on_record))
    for row in rows:
        # What a fork has from its parent was drawn there.
        own = sum(row["sampled"]) - lines.get(row["episode_id"], {}).get("pinned_tokens", 0)
        drawn[row["episode_id"]] = max(drawn[row["episode_id"]], own)
    opened = {line.split()[1] for line in sessions if line.startswith("open")}
    closed = {line.split()[1] for line in sessions if line.startswith("close")}
    return RunAccount(
        archive_missing=len(lines.keys() - counts.keys()),
        archive_doubled=sum(number - (name in lines) for name, number in counts.items()),
        archive_differs=sum(any(row[name] != lines[row["episode_id"]][name] for name in _COMPARED) for row in known),
        goodput_tokens_lost=sum(max(0, drawn[name] - line["sampled_tokens"]) for name, line in lines.items()),
        sessions_open=len(opened - closed),
        temporary_left=sum(1 for _ in temporary.glob("agentrl-*")),
    )


def _ledger(run: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (run / "ledger.jsonl").read_text().splitlines()]


def _archive(run: Path) -> list[dict[str, Any]]:
    columns = ["episode_id", "sampled", *_COMPARED]
    files = sorted((run / "episodes").glob("consumed-*.parquet"))
    return [row for file in files for row in pq.read_table(file, columns=columns).to_pylist()]
