"""One fault after the other on an engine of two under load: does the run go on, and how soon?

The run goes on when every player has had new tokens after the fault and a newer version is served; it has recovered
when the struck engine serves again, with a receipt.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from agentrl.inference.config import FleetConfig
from agentrl.inference.fleet import EngineState
from agentrl.testing.chaos import Fault, FaultKind, FaultPhase
from agentrl.testing.tiny import TINY_SHAPE, make_tiny_model
from agentrl.types.errors import AgentRLError
from agentrl.types.version import PolicyVersion
from tests.storms.fault_stage import EMBEDDED, OpenRouter, Setting, Stage, TrustingPublisher, playing, started

Models = tuple[tuple[Path, Path], Path]
PLAYERS = 8
GAP_LIMIT_NATS = 1e-3
TAKING_AWAY = (FaultKind.KILL, FaultKind.HANG)
CALM_SAMPLES = 5


def declared_s(fault: Fault, watch: FleetConfig, slow_s: float) -> float:
    """Seconds that the configuration allows from this fault to the end of its effect on the others."""
    if fault.kind is FaultKind.HANG:
        return watch.probe_s + watch.dead_s + watch.suspect_s
    return slow_s if fault.kind is FaultKind.SLOW else 0.0


class Outcomes:
    """What faults led to; `hangs` and `held` name them, seconds are counted from when the declared deadlines end."""

    def __init__(self) -> None:
        self.recovered = 0
        self.hangs: list[str] = []
        self.held: list[str] = []
        self.worst_over_s = -1e9
        self.worst_reply_over_s = -1e9
        self.healthy_reply_s = 0.0


async def strike(stage: Stage, fault: Fault, outcomes: Outcomes, run: asyncio.Task[None]) -> None:
    """One fault on engine a, until it serves again."""
    actor = stage.actors["a"]
    actor.arm(fault)
    try:
        async with asyncio.timeout(stage.setting.watch.wait_s):
            await actor.struck.wait()
            await _watch(stage, fault, outcomes, run)
    except TimeoutError:
        outcomes.hangs.append(str(fault))
        return
    outcomes.recovered += 1


async def _watch(stage: Stage, fault: Fault, outcomes: Outcomes, run: asyncio.Task[None]) -> None:
    struck_at, version = time.monotonic(), _newest(stage)
    was_held = False
    if fault.kind is FaultKind.HANG:
        await _until(lambda: stage.fleet.members["a"].state is EngineState.DEAD, run)
        was_held = max(stage.heard_at.values(), default=0.0) <= struck_at
    await _until(lambda: _all_since(stage.heard_at, struck_at) and _newest(stage) > version, run)
    due_at = struck_at + declared_s(fault, stage.setting.watch, 1.0)
    outcomes.worst_over_s = max(outcomes.worst_over_s, time.monotonic() - due_at)
    if fault.kind in TAKING_AWAY and (was_held or _serves_beyond(stage, "a", version)):
        outcomes.held.append(str(fault))
    await _until(lambda: _all_since(stage.replied_at, struck_at), run)
    outcomes.worst_reply_over_s = max(outcomes.worst_reply_over_s, time.monotonic() - due_at)
    await _until(lambda: _serves_beyond(stage, "a", version), run)


async def _healthy_reply_s(stage: Stage, run: asyncio.Task[None]) -> float:
    """Seconds until every player has a whole new reply and a newer version is served, while nothing is struck."""
    since, version = time.monotonic(), _newest(stage)
    await _until(lambda: _all_since(stage.replied_at, since) and _newest(stage) > version, run)
    return time.monotonic() - since


def _all_since(at: dict[int, float], since: float) -> bool:
    return all(at.get(number, 0.0) > since for number in range(PLAYERS))


def _newest(stage: Stage) -> PolicyVersion:
    return max(member.version for member in stage.fleet.members.values())


def _serves_beyond(stage: Stage, name: str, version: PolicyVersion) -> bool:
    """Whether the struck engine has proven newer weights since, which none can that is dead and not yet missed."""
    return name in stage.fleet.healthy and stage.fleet.members[name].version > version


async def _until(condition: object, run: asyncio.Task[None]) -> None:
    while not condition():  # type: ignore[operator]
        if run.done():
            run.result()
        await asyncio.sleep(0.01)


async def play_faults(stage: Stage, faults: list[Fault]) -> Outcomes:
    """One fault after the other on the first of two engines, under load all the time."""
    outcomes = Outcomes()
    async with playing(stage, PLAYERS) as run:
        outcomes.healthy_reply_s = max([await _healthy_reply_s(stage, run) for _ in range(CALM_SAMPLES)])
        for number, fault in enumerate(faults):
            started = time.monotonic()
            await _until(lambda: len(stage.fleet.healthy) == 2, run)
            await strike(stage, fault, outcomes, run)
            print(f"{number + 1}/{len(faults)} {fault}: {time.monotonic() - started:.1f} s", file=sys.stderr)
    return outcomes


async def play_hopeless(models: Models, logs: Path, setting: Setting = EMBEDDED) -> int:
    """Runs that cannot go on; how many say which engine failed where."""
    named = 0
    for fault, words in (
        (Fault(FaultKind.KILL, FaultPhase.SWAP), ("alone", "signal 9", "phase swap")),
        (Fault(FaultKind.HANG, FaultPhase.GENERATE), ("alone", "no answer to a probe", "in the phase")),
    ):
        message = await _end_of(Stage(*models, logs, setting, max_restarts=0), fault)
        named += all(word in message for word in words)
        print(message, file=sys.stderr)
    return named


async def _end_of(stage: Stage, fault: Fault) -> str:
    """What a run on a single engine says when that is struck and may not come back."""
    async with started(stage, "alone"), playing(stage, PLAYERS) as run:
        await _until(lambda: stage.fleet.members["alone"].version.step >= 2, run)
        stage.actors["alone"].arm(fault)
        async with asyncio.timeout(stage.setting.watch.wait_s):
            await asyncio.wait({run})
        return str(_first(run.exception()))


def _first(error: BaseException | None) -> BaseException | None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, AgentRLError), error
    return error


async def play_unprotected(stage: Stage) -> tuple[float, int]:
    """Gap that wrong weights leave without receipts, and spans of old weights without the fence."""
    actor = stage.actors["a"]
    await stage.publish_with(TrustingPublisher)
    stage.episodes.clear()
    async with playing(stage, PLAYERS) as run:
        await _until(lambda: stage.fleet.members["a"].version.step >= 2, run)
        actor.arm(Fault(FaultKind.WRONG_WEIGHTS, FaultPhase.SWAP))
        await actor.struck.wait()
        await _until_played(stage, 2 * PLAYERS, run)
    gap = stage.max_gap()
    stage.router = OpenRouter(stage.fleet, stage.setting.watch.wait_s)
    stage.episodes.clear()
    async with playing(stage, PLAYERS) as run:
        # Old weights may be gone again before a token is drawn of them; so a few times.
        for _ in range(4):
            await _until_played(stage, PLAYERS, run)
            actor.arm(Fault(FaultKind.OLD_WEIGHTS, FaultPhase.GENERATE))
            await actor.struck.wait()
    return gap, stage.unproven_spans()


async def _until_played(stage: Stage, count: int, run: asyncio.Task[None]) -> None:
    seen = len(stage.episodes)
    await _until(lambda: len(stage.episodes) >= seen + count, run)


def make_models(folder: Path) -> Models:
    """Weights of even and odd steps, and wrong ones, all of one shape."""
    shape = TINY_SHAPE.model_copy(update={"context_tokens": 4096})
    even, odd, wrong = (make_tiny_model(folder / str(seed), seed, shape) for seed in range(3))
    return (even, odd), wrong
