from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from agentrl.inference.config import FleetConfig
from agentrl.inference.fleet import EngineState, Fleet
from agentrl.inference.supervision import FleetSupervisor
from agentrl.testing.clock import run_virtual
from agentrl.types.errors import AgentRLError, EngineError, EngineRestartedError, EngineTakenError
from agentrl.types.version import PolicyVersion

FIRST, SECOND = PolicyVersion(0, 0), PolicyVersion(0, 1)
CONFIG = FleetConfig(probe_s=2.0, suspect_s=5.0, dead_s=20.0)


class ProbedEngine:
    """Answers probes as `answer` says: a version, an error, or silence (None)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.answer: PolicyVersion | AgentRLError | None = FIRST
        self.is_there = True
        self.pauses_late = self.is_slow = False
        self.repeated_calls: Counter[str] = Counter()

    async def resume(self) -> None:
        self.pauses_late = False

    async def ping(self) -> None:
        if not self.is_there:
            await asyncio.Event().wait()

    async def probe(self) -> PolicyVersion:
        if self.answer is None:
            await asyncio.Event().wait()
        if self.is_slow:
            await asyncio.sleep(1.5)
        if self.pauses_late:
            raise EngineError(f"engine {self.name} is paused")
        if isinstance(self.answer, AgentRLError):
            raise self.answer
        return self.answer  # type: ignore[return-value]


class Keeper:
    """Engines end when told to; a new one takes as long as `restart_s`, `restarts` times."""

    def __init__(self, restarts: int = 1, restart_s: float = 3.0) -> None:
        self._ends: dict[str, asyncio.Future[str]] = {}
        self.restarts, self._restart_s = restarts, restart_s
        self.revived: list[ProbedEngine] = []

    def end(self, name: str) -> None:
        self._ends.pop(name).set_result(f"{name} ended (signal 9)")

    async def engine_ended(self, name: str) -> str:
        return await self._ends.setdefault(name, asyncio.get_running_loop().create_future())

    async def revive_engine(self, name: str) -> ProbedEngine:
        await asyncio.sleep(self._restart_s)
        if not self.restarts:
            raise EngineError("started anew too often")
        self.restarts -= 1
        self.revived.append(ProbedEngine(name))
        return self.revived[-1]


Play = Callable[[Fleet, list[ProbedEngine], Keeper], Awaitable[None]]


def supervised(play: Play, keeper: Keeper | None = None) -> None:
    """Play against a supervised fleet of two on a virtual clock."""

    async def run() -> None:
        engines, warden = [ProbedEngine("a"), ProbedEngine("b")], keeper or Keeper()
        fleet = Fleet(engines, FIRST)  # type: ignore[arg-type]
        supervisor = asyncio.create_task(FleetSupervisor(fleet, warden, CONFIG).run())  # type: ignore[arg-type]
        playing = asyncio.create_task(play(fleet, engines, warden))  # type: ignore[arg-type]
        await asyncio.wait({supervisor, playing}, return_when=asyncio.FIRST_COMPLETED)
        supervisor.cancel()
        playing.cancel()
        if supervisor.done() and not supervisor.cancelled():
            await supervisor
        await playing

    run_virtual(run())


def test_an_engine_that_ends_is_dead_at_once_and_its_successor_waits_for_weights() -> None:
    async def play(fleet: Fleet, engines: list[ProbedEngine], keeper: Keeper) -> None:
        await asyncio.sleep(1.0)
        gone = fleet.members["a"].unreachable
        engines[0].repeated_calls["/pause_generation"] = 3
        keeper.end("a")
        await asyncio.sleep(0.1)
        assert fleet.aside == {"a": "a ended (signal 9) (in the phase generate)"}
        assert fleet.members["a"].state is EngineState.DEAD
        assert gone.done()
        await asyncio.sleep(3.5)
        assert fleet.members["a"].state is EngineState.STALE
        assert fleet.members["a"].engine is keeper.revived[0]
        assert not fleet.members["a"].unreachable.done()
        assert fleet.healthy == ["b"]
        keeper.revived[0].repeated_calls["/continue_generation"] = 1
        engines[1].repeated_calls["/continue_generation"] = 1
        counted = fleet.metrics()
        assert (counted["engines/stale"], counted["engines/restarts_total"]) == (1.0, 1.0)
        assert counted["engines/repeated_calls_total"] == 5.0, "those of the engine that ended are kept"
        assert counted["engines/distrusted_total"] == 0.0

    supervised(play)


def test_an_engine_that_dies_while_its_weights_change_is_named_with_the_phase() -> None:
    async def play(fleet: Fleet, engines: list[ProbedEngine], keeper: Keeper) -> None:
        await asyncio.sleep(1.0)
        fleet.members["a"].phase = "swap"
        keeper.end("a")
        await asyncio.sleep(0.1)
        assert fleet.aside == {"a": "a ended (signal 9) (weights: in the phase swap)"}

    supervised(play)


def test_an_engine_that_has_lost_its_mark_is_dead_at_once_and_taken_again() -> None:
    async def play(fleet: Fleet, engines: list[ProbedEngine], keeper: Keeper) -> None:
        await asyncio.sleep(1.0)
        engines[0].answer = EngineRestartedError("a has started again")
        await asyncio.sleep(CONFIG.probe_s)
        assert fleet.aside == {"a": "a has started again (in the phase generate)"}
        await asyncio.sleep(CONFIG.probe_s + 2.0)
        assert fleet.members["a"].engine is keeper.revived[0]
        assert fleet.members["a"].state is EngineState.STALE

    supervised(play)


def test_an_engine_that_belongs_to_another_run_ends_this_one() -> None:
    async def play(fleet: Fleet, engines: list[ProbedEngine], keeper: Keeper) -> None:
        engines[0].answer = EngineTakenError("a belongs to the run 'other'")
        await asyncio.sleep(60.0)

    with pytest.raises(BaseExceptionGroup) as caught:
        supervised(play)
    (error,) = caught.value.exceptions
    assert isinstance(error, EngineTakenError)


@pytest.mark.parametrize("silence", [None, EngineError("refused")])
def test_a_silent_engine_is_suspect_then_dead_within_the_declared_time(silence: EngineError | None) -> None:
    async def play(fleet: Fleet, engines: list[ProbedEngine], keeper: Keeper) -> None:
        await asyncio.sleep(3.0)
        engines[0].answer = silence
        await asyncio.sleep(CONFIG.probe_s + CONFIG.suspect_s)
        assert fleet.members["a"].state is EngineState.SUSPECT
        assert fleet.healthy == ["b"]
        await asyncio.sleep(CONFIG.dead_s)
        assert keeper.revived, "its place is given to a new process"

    supervised(play)


def test_a_suspect_that_answers_again_serves_again() -> None:
    async def play(fleet: Fleet, engines: list[ProbedEngine], keeper: Keeper) -> None:
        engines[0].answer = EngineError("busy")
        await asyncio.sleep(5.0)
        assert fleet.healthy == ["b"]
        engines[0].answer = FIRST
        await asyncio.sleep(5.0)
        assert fleet.healthy == ["a", "b"]
        assert not keeper.revived

    supervised(play)


def test_a_suspect_that_missed_a_publication_waits_for_weights() -> None:
    async def play(fleet: Fleet, engines: list[ProbedEngine], keeper: Keeper) -> None:
        engines[0].answer = EngineError("busy")
        await asyncio.sleep(5.0)
        fleet.newest = SECOND
        engines[0].answer = FIRST
        await asyncio.sleep(5.0)
        assert fleet.aside == {"a": "missed version 0.1 while it was suspect"}
        assert fleet.stale == ["a"]

    supervised(play)


def test_an_engine_that_a_late_pause_has_reached_generates_again() -> None:
    async def play(fleet: Fleet, engines: list[ProbedEngine], keeper: Keeper) -> None:
        engines[0].pauses_late = True
        await asyncio.sleep(CONFIG.probe_s + 0.1)
        assert fleet.healthy == ["b"], "it must not count as healthy while requests wait inside"
        await asyncio.sleep(CONFIG.probe_s)
        assert fleet.healthy == ["a", "b"]
        assert not keeper.revived

    supervised(play)


def test_an_engine_that_is_paused_for_new_weights_while_it_is_probed_is_no_suspect() -> None:
    async def play(fleet: Fleet, engines: list[ProbedEngine], keeper: Keeper) -> None:
        engines[0].is_slow = True
        await asyncio.sleep(CONFIG.probe_s + 0.1)
        async with fleet.members["a"].update_lock:
            engines[0].pauses_late = True
            await asyncio.sleep(1.0)
            fleet.begin_proof("a", SECOND)
            fleet.proven("a")
            engines[0].answer = SECOND
        await asyncio.sleep(1.0)
        assert fleet.healthy == ["a", "b"]

    supervised(play)


def test_an_engine_that_somebody_restarted_with_other_weights_is_stale() -> None:
    async def play(fleet: Fleet, engines: list[ProbedEngine], keeper: Keeper) -> None:
        engines[0].answer = SECOND
        await asyncio.sleep(5.0)
        assert fleet.members["a"].state is EngineState.STALE
        assert fleet.aside == {"a": "serves version 0.1 instead of 0.0"}

    supervised(play)


def test_an_engine_whose_weights_change_is_only_asked_whether_it_is_there() -> None:
    async def play(fleet: Fleet, engines: list[ProbedEngine], keeper: Keeper) -> None:
        async with fleet.members["a"].update_lock:
            engines[0].answer = None
            await asyncio.sleep(60.0)
            assert fleet.healthy == ["a", "b"]
            engines[0].answer = FIRST
        await asyncio.sleep(10.0)
        assert fleet.healthy == ["a", "b"]

    supervised(play)


def test_an_engine_that_hangs_while_its_weights_change_is_dead_within_the_declared_time() -> None:
    async def play(fleet: Fleet, engines: list[ProbedEngine], keeper: Keeper) -> None:
        async with fleet.members["a"].update_lock:
            engines[0].is_there = False
            await asyncio.sleep(CONFIG.probe_s + CONFIG.dead_s + CONFIG.suspect_s + 1.0)
            assert keeper.revived, "it was dead, and its place is given to a new process"

    supervised(play)


def test_the_run_ends_when_no_engine_can_come_back_and_not_before() -> None:
    async def play(fleet: Fleet, engines: list[ProbedEngine], keeper: Keeper) -> None:
        await asyncio.sleep(1.0)
        keeper.end("a")
        await asyncio.sleep(10.0)
        assert fleet.members["a"].state is EngineState.DEAD
        keeper.end("b")
        await asyncio.sleep(100.0)
        raise AssertionError("nobody noticed")

    with pytest.raises(BaseExceptionGroup) as caught:
        supervised(play, Keeper(restarts=0))
    message = str(caught.value.exceptions[0])
    assert "no engine is left: a: a ended (signal 9); started anew too often (in the phase generate); b: " in message


def test_an_engine_that_joins_waits_for_weights_and_is_watched() -> None:
    async def play(fleet: Fleet, engines: list[ProbedEngine], keeper: Keeper) -> None:
        await asyncio.sleep(1.0)
        fleet.joined(ProbedEngine("c"))  # type: ignore[arg-type]
        assert fleet.stale == ["c"]
        assert fleet.healthy == ["a", "b"]
        fleet.begin_proof("c", SECOND)
        fleet.proven("c")
        assert "c" in fleet.healthy
        await asyncio.sleep(1.0)
        keeper.end("c")
        await asyncio.sleep(0.1)
        assert fleet.members["c"].state is EngineState.DEAD

    supervised(play)
