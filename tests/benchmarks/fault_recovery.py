"""One fault after the other on an engine of two under load: does the run go on, and how soon?

Every kind of fault strikes at every phase where it means something: kill, hang (SIGSTOP), slowness, a lost reply,
a call that comes twice, wrong weights under the right label, and old weights behind everybody's back. The run goes
on when every player has had new tokens after the fault and a newer version is served; it has recovered when the struck
engine serves again, with a receipt.

Figures: `faults`; `recovered`; `named_errors`, runs with nothing to go on with that ended by an error naming engine
and phase, of `hopeless`; `hangs`, faults after which neither happened in 60 s; `held`, faults that took an engine away
and let the run go on only once it was back, or hung it and let nobody have a token until it was given up;
`worst_over_deadline_s`, the longest time from a fault to the run's going on, less the deadlines that are declared for
it; `worst_reply_over_s`, the same until every player has had a whole new reply, which takes `healthy_reply_s` at most
where nothing is struck; `tokens_twice`-like checks are `max_gap`, of every token that was committed, recomputed under
the version that its span names, and `unproven_spans`, spans of old weights that came back.
`found_without_protection`: without receipts wrong weights show as a gap, without the publish fence old weights show as
unproven spans.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from agentrl.inference.attempts import Cause
from agentrl.inference.config import FleetConfig
from agentrl.inference.fleet import EngineState
from agentrl.testing.chaos import Fault, FaultKind, FaultPhase
from agentrl.testing.tiny import TINY_SHAPE, make_tiny_model
from agentrl.types.errors import AgentRLError
from agentrl.types.version import PolicyVersion
from tests.benchmarks.fault_stage import EMBEDDED, OpenRouter, Setting, Stage, TrustingPublisher, playing, started
from tests.benchmarks.report import report

Models = tuple[tuple[Path, Path], Path]
PLAYERS = 8
GAP_LIMIT_NATS = 1e-3
EVERYWHERE = (FaultKind.KILL, FaultKind.HANG, FaultKind.SLOW, FaultKind.LOST_REPLY, FaultKind.DUPLICATED)
TAKING_AWAY = (FaultKind.KILL, FaultKind.HANG)
CALM_SAMPLES = 5
FAULTS = [Fault(kind, phase) for kind in EVERYWHERE for phase in FaultPhase] + [
    Fault(FaultKind.WRONG_WEIGHTS, FaultPhase.SWAP),
    Fault(FaultKind.OLD_WEIGHTS, FaultPhase.GENERATE),
    Fault(FaultKind.OLD_WEIGHTS, FaultPhase.RESUME),
]


def declared_s(fault: Fault, watch: FleetConfig, slow_s: float) -> float:
    """Seconds that the configuration allows from this fault to the end of its effect on the others."""
    if fault.kind is FaultKind.HANG:
        return watch.probe_s + watch.dead_s + watch.suspect_s
    return slow_s if fault.kind is FaultKind.SLOW else 0.0


class _Outcomes:
    def __init__(self) -> None:
        self.recovered = 0
        self.hangs: list[str] = []
        self.held: list[str] = []
        self.worst_over_s = -1e9
        self.worst_reply_over_s = -1e9
        self.healthy_reply_s = 0.0


async def strike(stage: Stage, fault: Fault, outcomes: _Outcomes, run: asyncio.Task[None]) -> None:
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


async def _watch(stage: Stage, fault: Fault, outcomes: _Outcomes, run: asyncio.Task[None]) -> None:
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


async def play_faults(stage: Stage, faults: list[Fault]) -> _Outcomes:
    """One fault after the other on the first of two engines, under load all the time."""
    outcomes = _Outcomes()
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


async def measure(folder: Path, faults: list[Fault], setting: Setting, benchmark: str) -> None:
    """Play all faults and the storms without protection, and print the line."""
    models = make_models(folder)
    stage = Stage(*models, folder, setting)
    async with started(stage, "a", "b"):
        outcomes, router = await play_faults(stage, faults), stage.router
        max_gap, unproven_spans = stage.max_gap(), stage.unproven_spans()
        publications = max(member.version.step for member in stage.fleet.members.values())
        gap, unproven = await play_unprotected(stage)
    named = await play_hopeless(models, folder, setting)
    report(
        benchmark,
        faults=len(faults),
        recovered=outcomes.recovered,
        named_errors=named,
        hopeless=2,
        hangs=len(outcomes.hangs),
        hanging=outcomes.hangs,
        held=outcomes.held,
        worst_over_deadline_s=round(outcomes.worst_over_s, 2),
        worst_reply_over_s=round(outcomes.worst_reply_over_s, 2),
        healthy_reply_s=round(outcomes.healthy_reply_s, 2),
        max_gap=max_gap,
        unproven_spans=unproven_spans,
        failed_episodes=len(stage.failed_episodes),
        found_without_protection=gap > GAP_LIMIT_NATS and unproven > 0,
        gap_without_receipts=gap,
        unproven_spans_without_fence=unproven,
        publications=publications,
        regenerated=router.regenerated,
        fenced=router.resent[Cause.FENCED],
        players=PLAYERS,
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), FAULTS, EMBEDDED, "fault_recovery"))


if __name__ == "__main__":
    main()
