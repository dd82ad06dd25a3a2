"""Scorers of turns with faults beside episodes that are played, through a real pool, worker and journal.

Each fault is played with its protection and without. Who judges knows what the scripted scorer says of each turn, and
recomputes that from the record of the episode; the scorer itself counts what it is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from agentrl.orchestration.run_directory import RunDirectory
from agentrl.scoring import answers, queue
from agentrl.scoring.pool import Pool
from agentrl.scoring.tier import ScoringTier
from agentrl.types.episode import Episode
from agentrl.types.turn_score import ScoredTurn, TurnScore
from tests.storms.scorer_plugins import APART, NAME, ON_LOOP, OTHER_VERSION, num_struck
from tests.storms.worker_pools import PlayedPool, make_run, nothing, playing

FAULTS = ("dies", "hangs", "nan", "wrong_turn", "twice", "version", "behind", "killed")
# What a record's failure, or a counter of the scorer, calls it.
SAID = {
    "dies": "died",
    "hangs": f"scorer.{NAME}",
    "nan": "value",
    "wrong_turn": "missing",
    "twice": "repeated",
    "version": "version",
    "behind": f"scorer.{NAME}",
}
_AT_ONCE, _CALM, _DELAYED = 8, 4, 12
_CALL_S = 10.0
_DEADLINE_S = 300.0
MAX_WAITING, _PLACES, _TURNS = 6, 4, 4
_MOST_WAITING = MAX_WAITING + _PLACES * _TURNS
"""Turns that may wait: those of episodes that were admitted while there was room come to the bound."""
UNPROTECTED = "AGENTRL_UNPROTECTED"


@dataclass(slots=True)
class FaultVerdict:
    """What a fault did: each number but the first two is of something that must not happen.

    `said` counts what records and counters call failures. `hangs` are runs that came to no end, `invented_zeros` scores
    that nobody gave, zero or not a number, `wrong_turn` scores of another turn or version than they stand beside,
    `unscored` is 1 if the scorer judged nothing once its fault was over, `overflow` counts turns that waited beyond the
    bound, `asked_twice` turns that were sent again with a score on record, or after a failure, `unsaid` is 1 if
    nothing says what happened.
    """

    struck: int = 0
    said: Counter[str] = field(default_factory=Counter)
    hangs: int = 0
    invented_zeros: int = 0
    wrong_turn: int = 0
    unscored: int = 0
    overflow: int = 0
    asked_twice: int = 0
    unsaid: int = 0

    @property
    def num_faults(self) -> int:
        """All that must not happen."""
        found = (self.hangs, self.invented_zeros, self.wrong_turn, self.unscored, self.overflow, self.asked_twice)
        return sum(found) + self.unsaid

    def look(self, episode: Episode) -> None:
        """Hold what stands beside the turns of an episode against what the scorer says of them."""
        truths = {turn.index: context_tokens(episode, turn.reply_node) / 1000 for turn in episode.turns}
        scores = episode.turn_scores.get(NAME, ())
        for score in scores:
            if score.value is None or not math.isfinite(score.value) or score.value == 0:
                self.invented_zeros += 1
            elif score.value != truths[score.key.turn] or score.version == OTHER_VERSION:
                self.wrong_turn += 1
        [record] = [record for record in episode.scores if record.scorer == NAME]
        if record.failure is not None:
            self.said[record.failure.kind] += 1
            self.invented_zeros += record.score is not None
        elif len(scores) != len(truths):
            self.invented_zeros += 1


def context_tokens(episode: Episode, node: int | None) -> int:
    """Tokens from the root of an episode to the end of a node."""
    total = 0
    while node is not None:
        total += len(episode.nodes[node].token_ids)
        node = episode.nodes[node].parent
    return total


async def strike(folder: Path, model: Path, fault: str, strikes: int, is_protected: bool = True) -> FaultVerdict:
    """Episodes whose scorer has a fault until it has struck several batches, and then some more."""
    verdict, file = FaultVerdict(), folder / "asked"
    folder.mkdir(parents=True)
    scorer = {"kind": APART if fault in ("dies", "hangs") else ON_LOOP, "fault": fault, "strikes": strikes}
    # Without a protection some turns wait in vain, and there is no need to wait for long.
    limits = {"call_s": _CALL_S, "deadline_s": 60.0} if is_protected else {"call_s": 3600.0, "deadline_s": 10.0}
    run = _run(folder, model, {**scorer, **limits, "count_file": str(file)})
    with contextlib.nullcontext() if is_protected else _without(fault):
        async with playing(run, delay_s=0.02) as pool:
            try:
                async with asyncio.timeout(_DEADLINE_S):
                    await _play_until_over(pool, verdict, lambda: num_struck(file.with_suffix(".struck")) >= strikes)
            except TimeoutError:
                verdict.hangs += 1
            counters = pool.scoring.metrics()
    verdict.struck = num_struck(file.with_suffix(".struck"))
    verdict.asked_twice = len(lines := file.read_text().splitlines()) - len({line.split(" ", 1)[1] for line in lines})
    _read_counters(verdict, counters)
    verdict.unsaid += SAID[fault] not in verdict.said
    return verdict


async def _play_until_over(pool: PlayedPool, verdict: FaultVerdict, is_over: Callable[[], bool]) -> None:
    first = 0
    while not is_over():
        for episode in await _judged(pool, range(first, first + _AT_ONCE)):
            verdict.look(episode)
        first += _AT_ONCE
    calm = await _judged(pool, range(first, first + _CALM))
    for episode in calm:
        verdict.look(episode)
    verdict.unscored += not any(len(episode.turn_scores.get(NAME, ())) == len(episode.turns) for episode in calm)


async def _judged(pool: PlayedPool, numbers: Sequence[int]) -> list[Episode]:
    async def play(number: int) -> Episode:
        return await pool.judge(await pool.pool.play(pool.ticket(number), (), nothing))

    return await asyncio.gather(*map(play, numbers))


async def fall_behind(folder: Path, model: Path, is_protected: bool = True) -> FaultVerdict:
    """A scorer that answers nothing: episodes are admitted as a run does it, and the line must stay short."""
    verdict, file = FaultVerdict(), folder / "asked"
    folder.mkdir(parents=True)
    late = {"fault": "behind", "strikes": 1 << 30, "batch_turns": 2, "latency_s": 0.0, "call_s": 3600.0}
    # Without the protection nothing leaves the line before all has been played.
    limits = {"deadline_s": 2.0 if is_protected else 3600.0, "pool": {"max_waiting": MAX_WAITING}}
    run = _run(folder, model, {**late, **limits, "count_file": str(file)})
    with contextlib.nullcontext() if is_protected else _without("behind"):
        async with playing(run) as pool:
            try:
                async with asyncio.timeout(_DEADLINE_S):
                    most = await _admit(pool, verdict, is_protected)
            except TimeoutError:
                verdict.hangs += 1
                most = 0.0
            counters = pool.scoring.metrics()
    verdict.struck, verdict.overflow = num_struck(file.with_suffix(".struck")), max(int(most) - _MOST_WAITING, 0)
    _read_counters(verdict, counters)
    if is_protected:
        verdict.unsaid = int(SAID["behind"] not in verdict.said or counters["scorer/held_admission_s"] == 0)
    return verdict


async def _admit(pool: PlayedPool, verdict: FaultVerdict, is_judged: bool) -> float:
    """Play episodes as there are places and room; returns how many turns waited at most."""
    places, most = asyncio.Semaphore(_PLACES), 0.0
    judging: list[asyncio.Task[Episode]] = []

    async def play(number: int) -> Episode:
        nonlocal most
        episode = await pool.pool.play(pool.ticket(number), (), _given_back(places))
        most = max(most, pool.scoring.metrics()[f"scorer/{NAME}/waiting_turns"])
        return episode

    async def settle(playing: asyncio.Task[Episode]) -> Episode:
        return await pool.judge(await playing)

    played = []
    for number in range(_DELAYED):
        await pool.scoring.room()
        await places.acquire()
        played.append(asyncio.create_task(play(number)))
        judging.append(asyncio.create_task(settle(played[-1])))
    await asyncio.gather(*played)
    if not is_judged:
        for task in judging:
            task.cancel()
        await asyncio.wait(judging)
        return most
    for episode in await asyncio.gather(*judging):
        verdict.look(episode)
    return most


def _given_back(places: asyncio.Semaphore) -> Callable[[], Any]:
    async def release() -> None:
        places.release()

    return release


def kill(folder: Path, model: Path, num_kills: int, seed: int, is_protected: bool = True) -> FaultVerdict:
    """Kill a process that plays and scores, again and again, and let it go on: what is on record is not asked about."""
    verdict, rng = FaultVerdict(), random.Random(seed)
    folder.mkdir(parents=True)
    file = folder / "asked"
    # One that is waited for is asked by the next start, too; who only records is not.
    run = _run(folder, model, {"count_file": str(file), "batch_turns": 2, "latency_s": 0.1, "late": "wait"})
    for number in range(num_kills + 1):
        process = _start(run, number, is_protected)
        if number < num_kills:
            _wait_for_lines(process, file, rng.randint(4, 12), folder)
            os.killpg(process.pid, signal.SIGKILL)
            verdict.struck += 1
        try:
            verdict.hangs += process.wait(_DEADLINE_S) not in (0, -signal.SIGKILL)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            verdict.hangs += 1
        known = {tuple(key) for key in json.loads((folder / f"known-{number}.json").read_text())}
        asked = [
            tuple(line.split()[1:]) for line in file.read_text().splitlines() if line.startswith(f"{process.pid} ")
        ]
        verdict.asked_twice += sum(key in known for key in asked) + len(asked) - len(set(asked))
        verdict.said["on_record"] += len(known)
    for name in json.loads((folder / "verdict.json").read_text()):
        setattr(verdict, name, getattr(verdict, name) + 1)
    return verdict


def _start(run: RunDirectory, number: int, is_protected: bool) -> subprocess.Popen[bytes]:
    environment = {**os.environ, UNPROTECTED: "" if is_protected else "forgetful"}
    with (run.path.parent / "output.txt").open("ab") as output:
        command = [sys.executable, "-m", "tests.storms.scored_run", str(run.path), str(number)]
        return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, env=environment)


def _wait_for_lines(process: subprocess.Popen[bytes], file: Path, number: int, folder: Path) -> None:
    """Wait until this start has asked about some turns."""
    until = time.monotonic() + _DEADLINE_S
    while not file.is_file() or file.read_text().count(f"{process.pid} ") < number:
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"it asked about too few turns:\n{(folder / 'output.txt').read_text()[-3000:]}")
        time.sleep(0.01)


def _run(folder: Path, model: Path, scorer: dict[str, Any]) -> RunDirectory:
    scorers = [{"kind": "verifier"}, {"kind": ON_LOOP, "name": NAME, "concurrency": 1, **scorer}]
    environment = {"name": "sql", "options": {}, "scorers": scorers}
    return make_run(model, folder, environment=environment, buffer={"group_size": 1})


def _read_counters(verdict: FaultVerdict, counters: dict[str, float]) -> None:
    for name in ("stray", "repeated", "mixed", "workers_lost", "deadline_misses"):
        if number := counters.get(f"scorer/{NAME}/{name}_total"):
            verdict.said[name] += int(number)


def _by_position(turns: Sequence[ScoredTurn], given: Sequence[TurnScore], counts: Counter[str]) -> list[TurnScore]:
    return [replace(score, key=turn.key) for turn, score in zip(turns, given, strict=False)]


def _last_wins(turns: Sequence[ScoredTurn], given: Sequence[TurnScore], counts: Counter[str]) -> list[TurnScore]:
    found = {score.key: score for score in given}
    return [found[turn.key] for turn in turns]


async def _always_room(tier: ScoringTier) -> None:
    """Admission never waits."""


@contextlib.contextmanager
def _without(fault: str) -> Iterator[None]:
    """Take away what protects from a fault; of a scorer that hangs that is the deadline, a setting."""
    patches = {
        "dies": lambda: mock.patch.object(Pool, "scale", return_value=None),
        "hangs": contextlib.nullcontext,
        "nan": lambda: mock.patch.object(answers, "check_turn_score", lambda turn, score: score),
        "wrong_turn": lambda: mock.patch.object(queue, "matched", _by_position),
        "twice": lambda: mock.patch.object(queue, "matched", _last_wins),
        "version": lambda: mock.patch.object(queue, "matched", _last_wins),
        "behind": lambda: mock.patch.object(ScoringTier, "room", _always_room),
    }
    with patches[fault]():
        yield
