"""Plays and judges episodes, and goes on where an earlier start was killed.

``python -m tests.storms.scored_run RUN N``: what was on record of turns at the start N goes to ``known-N.json`` beside
the run; the last start, which ends, leaves in ``verdict.json`` what is wrong with the scores of all episodes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from agentrl.journal.reading import read_journal
from agentrl.orchestration.run_directory import RunDirectory
from agentrl.orchestration.run_journal import RunJournal
from agentrl.process.loop import run_async
from agentrl.types.episode import Episode, Ticket
from agentrl.types.rollout import PackedEntry
from tests.storms.scorer_faults import UNPROTECTED, FaultVerdict
from tests.storms.scorer_plugins import NAME
from tests.storms.worker_pools import PlayedPool, nothing, playing

NUM_EPISODES = 16


async def go_on(run: RunDirectory, number: int) -> list[Episode]:
    """Play and judge what is left of all episodes; returns those of this start."""
    lives = read_journal(run.journal).lives if any(run.journal.glob("*.journal")) else {}
    known = [
        (key.episode_id, key.turn, key.digest)
        for life in lives.values()
        for key in life.turn_scores.get(NAME, {})
    ]  # fmt: skip
    beside = run.path.parent / f"known-{number}.json"
    beside.write_text(json.dumps([[str(part) for part in key] for key in known]))
    async with playing(run, delay_s=0.05) as pool:
        running, unscored = pool.journal.hand_over()
        if os.environ[UNPROTECTED]:
            unscored = tuple(replace(episode, turn_scores={}) for episode in unscored)
        began = [pool.ticket(number) for number in range(NUM_EPISODES)]
        fresh = [ticket for ticket in began if ticket.episode_id not in lives]
        playing_on = [_play(pool, ticket, entries) for ticket, entries in [*running, *((t, ()) for t in fresh)]]
        return await asyncio.gather(*playing_on, *(pool.judge(episode) for episode in unscored))


async def _play(pool: PlayedPool, ticket: Ticket, entries: tuple[PackedEntry, ...]) -> Episode:
    return await pool.judge(await pool.pool.play(ticket, entries, nothing))


def judge(run: RunDirectory) -> list[str]:
    """Names of what is wrong, as a verdict has them, with what is on record at the end."""
    verdict, found = FaultVerdict(), []
    episodes = [life.episode() for life in read_journal(run.journal).lives.values() if life.ended is not None]
    for episode in episodes:
        verdict.look(episode)
    found += ["invented_zeros"] * verdict.invented_zeros + ["wrong_turn"] * verdict.wrong_turn
    missing = sum(len(episode.turn_scores.get(NAME, ())) < len(episode.turns) for episode in episodes)
    return found + ["unscored"] * (missing + NUM_EPISODES - len(episodes))


def main() -> None:
    if os.environ[UNPROTECTED]:
        RunJournal.turn_scores = lambda journal: {}  # type: ignore[method-assign]
    run, number = RunDirectory.open(Path(sys.argv[1])), int(sys.argv[2])
    run_async(go_on(run, number))
    (run.path.parent / "verdict.json").write_text(json.dumps(judge(run)))


if __name__ == "__main__":
    main()
