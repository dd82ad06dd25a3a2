"""The account of a run finds each fault that its counts are for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.storms.run_account import RunAccount, account_of

TRAINED = {"episode_id": "a", "outcome": "trained", "reason": "", "turns": 2, "sampled_tokens": 3}
DROPPED = {"episode_id": "b", "outcome": "dropped", "reason": "stale", "turns": 1, "sampled_tokens": 2}


def row(line: dict[str, Any], **changes: Any) -> dict[str, Any]:
    tokens = line["sampled_tokens"]
    return {**line, "reason": line["reason"] or None, "sampled": [False] + [True] * tokens, **changes}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "episodes").mkdir()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (TRAINED, DROPPED)))
    return tmp_path


def account(
    run: Path, *rows: dict[str, Any], on_record: dict[str, int] | None = None, sessions: str = ""
) -> RunAccount:
    pq.write_table(pa.Table.from_pylist(list(rows)), run / "episodes" / "consumed-000001-000001.parquet")
    return account_of(run, on_record or {}, sessions.splitlines(), run / "tmp")


def test_a_run_that_is_in_order_has_zeros(run: Path) -> None:
    sessions = "open 1\nopen 2\nclose 2\nclose 1"
    assert account(run, row(TRAINED), row(DROPPED), on_record={"a": 3, "b": 1}, sessions=sessions) == RunAccount()


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(TRAINED)], RunAccount(archive_missing=1)),
        ([row(TRAINED), row(DROPPED), row(DROPPED)], RunAccount(archive_doubled=1)),
        ([row(TRAINED), row(DROPPED), row(DROPPED, episode_id="c")], RunAccount(archive_doubled=1)),
        ([row(TRAINED), row(DROPPED, reason="failed")], RunAccount(archive_differs=1)),
        ([row(TRAINED, sampled=[True] * 7), row(DROPPED)], RunAccount(goodput_tokens_lost=4)),
    ],
)
def test_what_the_archive_has_otherwise_than_the_ledger_is_counted(
    rows: list[dict[str, Any]], expected: RunAccount, run: Path
) -> None:
    assert account(run, *rows) == expected


def test_tokens_that_were_on_record_and_reached_no_ledger_are_counted(run: Path) -> None:
    assert account(run, row(TRAINED), row(DROPPED), on_record={"b": 9}) == RunAccount(goodput_tokens_lost=7)


def test_what_stays_open_or_stays_behind_is_counted(run: Path) -> None:
    (run / "tmp" / "agentrl-x").mkdir()
    found = account(run, row(TRAINED), row(DROPPED), sessions="open 1\nopen 2\nclose 2")
    assert found == RunAccount(sessions_open=1, temporary_left=1)
