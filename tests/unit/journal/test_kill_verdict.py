from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentrl.journal import entries as e
from agentrl.types.generation import FinishReason, Generation
from agentrl.types.version import PolicyVersion, VersionSpan
from tests.storms.kill_verdict import KillVerdict
from tests.unit.journal.journals import Journal, name_of, turned, whole_life


def _part(*token_ids: int) -> e.PartialReply:
    spans = (VersionSpan(PolicyVersion(0, 3), 0, len(token_ids)),)
    logprobs = np.zeros(len(token_ids), np.float32)
    generation = Generation(np.array(token_ids, np.int32), logprobs, spans, spans, FinishReason.ABORT)
    return e.PartialReply(1, generation, "digest0")


def _checkpoint(run: Path, episodes: list[str], covered: int) -> None:
    """A ledger with these episodes, of which a checkpoint covers the first ones."""
    lines = [json.dumps({"episode_id": name}) + "\n" for name in episodes]
    (run / "ledger.jsonl").write_text("".join(lines))
    folder = run / "checkpoints" / "main" / "000003"
    folder.mkdir(parents=True, exist_ok=True)
    progress = {"number": 1, "ledger_bytes": len("".join(lines[:covered]))}
    (folder / "progress.json").write_text(json.dumps(progress))


@pytest.mark.parametrize(("reply", "lost"), [([4, 5, 6, 7], 0), ([4, 5], 0), ([4, 9, 6, 7], 1)])
def test_a_reply_that_does_not_go_on_from_its_delivered_part_counts_as_lost(
    tmp_path: Path, reply: list[int], lost: int
) -> None:
    journal, verdict = Journal(tmp_path / "journal"), KillVerdict(tmp_path, tmp_path / "count.txt")
    journal.play(0, [*whole_life(0)[:2], _part(4, 5), turned(0, reply)])
    verdict.look()
    assert verdict.turns_lost == lost


def test_a_delivered_part_that_is_gone_later_counts_as_lost(tmp_path: Path) -> None:
    journal, verdict = Journal(tmp_path / "journal"), KillVerdict(tmp_path, tmp_path / "count.txt")
    journal.play(0, [*whole_life(0)[:2], _part(4, 5)])
    verdict.look()
    assert verdict.turns_lost == 0
    journal.close("worker")
    (tmp_path / "journal" / "worker-00000001.journal").unlink()
    Journal(tmp_path / "journal").play(0, [*whole_life(0)[:2], turned(0, [4, 9, 6])])
    verdict.look()
    assert verdict.turns_lost == 1


@pytest.mark.parametrize(("covered", "lost"), [(1, 0), (0, 2)])
def test_only_lines_that_a_checkpoint_covers_make_an_episode_final(tmp_path: Path, covered: int, lost: int) -> None:
    journal, verdict = Journal(tmp_path / "journal"), KillVerdict(tmp_path, tmp_path / "count.txt")
    journal.play(0, whole_life(0))
    _checkpoint(tmp_path, [name_of(0)], covered)
    verdict.look()
    journal.close("worker")
    (tmp_path / "journal" / "worker-00000001.journal").unlink()
    Journal(tmp_path / "journal").play(1, whole_life(1))
    verdict.look()
    assert verdict.turns_lost == lost


def test_a_run_that_has_ended_is_judged_by_its_whole_ledger(tmp_path: Path) -> None:
    journal, verdict = Journal(tmp_path / "journal"), KillVerdict(tmp_path, tmp_path / "count.txt")
    journal.play(0, whole_life(0))
    journal.play(1, whole_life(1))
    verdict.look()
    _checkpoint(tmp_path, [name_of(0)], covered=0)
    verdict.close()
    assert (verdict.turns_lost, verdict.ledger_gaps) == (0, 1)


@pytest.mark.parametrize(("covered", "is_lost"), [(1, False), (0, True)])
def test_what_pruning_leaves_of_an_episode_counts_as_lost_unless_it_is_final(
    tmp_path: Path, covered: int, is_lost: bool
) -> None:
    journal, verdict = Journal(tmp_path / "journal"), KillVerdict(tmp_path, tmp_path / "count.txt")
    begin = [*whole_life(0)[:2], _part(4, 5)]
    journal.play(0, begin)
    journal.rotate("worker")
    lease = replace(begin[0], token=2, taken_over=len(begin))
    journal.play(0, [lease, replace(_part(6, 7), token=2), replace(turned(0, [4, 5, 6, 7]), token=2)])
    verdict.look()
    assert verdict.turns_lost == 0
    (tmp_path / "journal" / "worker-00000001.journal").unlink()
    _checkpoint(tmp_path, [name_of(0)], covered)
    verdict.look()
    assert (verdict.turns_lost > 0) == is_lost
