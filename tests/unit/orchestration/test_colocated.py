from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from agentrl.inference.calls import LostAnswerError
from agentrl.inference.fleet import EngineState, Fleet
from agentrl.inference.router import EngineRouter
from agentrl.orchestration.colocated import ColocatedTrainer
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.runtime_checks import check_colocated, check_several_hosts
from agentrl.types.batch import StepReport, TrainBatch
from agentrl.types.errors import ConfigError, EngineError, EngineRefusedError, TrainerError
from agentrl.types.generation import FinishReason, Generation, GenerationRequest, Sampling
from agentrl.types.version import PolicyVersion, VersionSpan

FIRST = PolicyVersion(0, 0)
BATCH = TrainBatch("main", FIRST, ())
NUM_TOKENS = 200
TURNS_OF_A_STEP = 300


class CountingEngine:
    """Draws a token at each turn of the event loop, 1000 more than the position in the context; `log` has all events.

    `failing` is the call that raises `error`, once.
    """

    def __init__(self, name: str, log: list[str], failing: str = "", error: EngineError | None = None) -> None:
        self.name, self.log, self.failing, self.error = name, log, failing, error
        self.repeated_calls: Counter[str] = Counter()
        self.has_memory, self.is_paused = True, False
        self._going_on = asyncio.Event()
        self._going_on.set()
        self._in_flight = 0

    async def generate(self, request: GenerationRequest) -> Generation:
        await self._going_on.wait()
        ids: list[int] = []
        self._in_flight += 1
        while len(ids) < request.max_new_tokens and not self.is_paused:
            assert self.has_memory
            self.log.append(f"{self.name} token")
            ids.append(1000 + len(request.prompt_ids) + len(ids))
            await asyncio.sleep(0)
        self._in_flight -= 1
        spans = (VersionSpan(FIRST, 0, len(ids)),) if ids else ()
        finish = FinishReason.LENGTH if len(ids) == request.max_new_tokens else FinishReason.ABORT
        return Generation(np.asarray(ids, np.int32), np.zeros(len(ids), np.float32), spans, spans, finish)

    async def pause(self) -> int:
        self._say("pause")
        self.is_paused = True
        self._going_on.clear()
        return self._in_flight

    async def release_memory(self) -> None:
        assert self.is_paused
        while self._in_flight:
            await asyncio.sleep(0)
        self._say("release")
        self.has_memory = False

    async def resume_memory(self) -> None:
        self._say("take")
        assert not self.has_memory
        self.has_memory = True

    async def resume(self) -> None:
        self._say("resume")
        assert self.has_memory
        self.is_paused = False
        self._going_on.set()

    def _say(self, call: str) -> None:
        self.log.append(f"{self.name} {call}")
        if call == self.failing:
            self.failing = ""
            raise self.error or EngineError(f"{call} broke")


class LoggingTrainer:
    """Writes down when it steps; `during` is what happens meanwhile."""

    def __init__(self, log: list[str], during: Callable[[], object] = lambda: None) -> None:
        self._log, self._during = log, during

    async def step(self, batch: TrainBatch, is_redo: bool = False) -> StepReport:
        self._log.append("step begins")
        for _ in range(TURNS_OF_A_STEP):
            await asyncio.sleep(0)
        self._during()
        self._log.append("step ends")
        return StepReport(batch.version.next(), {"trainer/loss": 0.5})


async def _play(router: EngineRouter, session: str) -> list[int]:
    """A session's tokens, each request going on from the tokens before it."""
    done: list[int] = []
    for number in itertools.count():
        ids = np.arange(7 + len(done), dtype=np.int32)
        rid = f"{session}-{number:04d}"
        part = await router.generate(GenerationRequest(rid, session, ids, NUM_TOKENS - len(done), (), Sampling(), 0))
        done += part.token_ids.tolist()
        if len(done) == NUM_TOKENS:
            return done
    raise AssertionError


def _colocated(*engines: CountingEngine, **trainer: object) -> tuple[ColocatedTrainer, Fleet]:
    fleet = Fleet(engines, FIRST)  # type: ignore[arg-type]
    return ColocatedTrainer(LoggingTrainer(engines[0].log, **trainer), fleet), fleet  # type: ignore[arg-type]


async def test_no_engine_generates_while_the_trainer_steps_and_no_token_is_lost() -> None:
    log: list[str] = []
    engines = [CountingEngine(name, log) for name in "xy"]
    trainer, fleet = _colocated(*engines)
    router = EngineRouter(fleet, wait_s=60.0)
    sessions = [asyncio.create_task(_play(router, f"session-{n}")) for n in range(6)]
    reports = []
    for _ in range(4):
        for _ in range(20):
            await asyncio.sleep(0)
        reports.append(await trainer.step(BATCH))
    for tokens in await asyncio.gather(*sessions):
        assert tokens == [1000 + 7 + position for position in range(NUM_TOKENS)]
    assert router.interrupted > 6
    assert sum(report.metrics["colocated/interrupted_requests"] for report in reports) == router.interrupted
    inside = False
    for event in log:
        inside = {"step begins": True, "step ends": False}.get(event, inside)
        assert not (inside and event.endswith("token"))
    assert log.count("step begins") == 4
    assert sum(event.endswith("token") for event in log) == 6 * NUM_TOKENS


async def test_each_engine_gives_its_memory_before_the_step_and_has_it_before_it_generates() -> None:
    log: list[str] = []
    trainer, fleet = _colocated(CountingEngine("x", log))
    report = await trainer.step(BATCH)
    assert log == ["x pause", "x release", "step begins", "step ends", "x take", "x resume"]
    assert report.version == FIRST.next()
    assert report.metrics["trainer/loss"] == 0.5
    assert report.metrics["colocated/paused_s"] > 0.0
    assert fleet.open == ["x"]


@pytest.mark.parametrize("call", ["pause", "release", "take", "resume"])
async def test_an_engine_that_does_not_obey_is_set_aside_and_the_step_goes_on(call: str) -> None:
    log: list[str] = []
    broken, good = CountingEngine("x", log, call), CountingEngine("y", log)
    trainer, fleet = _colocated(broken, good)
    report = await trainer.step(BATCH)
    assert report.metrics["colocated/failed_engines"] == 1.0
    assert f"{call} broke" in fleet.aside["x"]
    assert fleet.healthy == ["y"]
    assert not good.is_paused


async def test_memory_that_an_engine_did_not_take_it_is_told_to_take_after_the_next_step() -> None:
    log: list[str] = []
    engine = CountingEngine("x", log, "take")
    trainer, _ = _colocated(engine)
    await trainer.step(BATCH)
    assert not engine.has_memory
    await trainer.step(BATCH)
    assert engine.has_memory
    assert log.count("x release") == 1, "a server that has released its memory fails at a second call"


@pytest.mark.parametrize(("error", "times"), [(EngineRefusedError("no", 400), 0), (LostAnswerError("lost"), 1)])
async def test_only_memory_that_may_have_been_released_is_taken_again(error: EngineError, times: int) -> None:
    log: list[str] = []
    engine = CountingEngine("x", log, "release", error)
    engine.has_memory = not times
    trainer, _ = _colocated(engine)
    await trainer.step(BATCH)
    assert log.count("x take") == times


async def test_engines_come_back_from_a_step_that_failed() -> None:
    log: list[str] = []
    engine = CountingEngine("x", log)

    def fail() -> None:
        raise TrainerError("no memory")

    trainer, fleet = _colocated(engine, during=fail)
    with pytest.raises(TrainerError, match="no memory"):
        await trainer.step(BATCH)
    assert engine.has_memory
    assert fleet.open == ["x"]


async def test_a_publication_under_way_ends_before_the_engines_pause() -> None:
    log: list[str] = []
    trainer, fleet = _colocated(CountingEngine("x", log), CountingEngine("y", log))
    async with fleet.members["y"].update_lock:
        step = asyncio.create_task(trainer.step(BATCH))
        for _ in range(TURNS_OF_A_STEP):
            await asyncio.sleep(0)
        assert log == []
        assert fleet.open == ["x", "y"], "both generate as long as one is waited for"
    await step
    assert "step ends" in log


async def test_a_process_that_took_a_dead_ones_place_meanwhile_is_left_alone() -> None:
    log: list[str] = []
    dead, new = CountingEngine("x", log), CountingEngine("x", log)
    trainer, fleet = _colocated(dead, CountingEngine("y", log), during=lambda: replace())

    def replace() -> None:
        fleet.dead("x", "killed")
        fleet.restarted("x", new)  # type: ignore[arg-type]

    await trainer.step(BATCH)
    assert (new.is_paused, new.has_memory) == (False, True)
    assert fleet.members["x"].state is EngineState.STALE
    assert [event for event in log if event.startswith("x")] == ["x pause", "x release"]


def _config(tmp_path: Path, policy: dict | None = None, environment: dict | None = None, colocated: bool = True):
    return RunConfig.model_validate(
        {
            "name": "test",
            "steps": 1,
            "environment": {"name": "some:thing", **(environment or {})},
            "policies": {"main": {"model": str(tmp_path), **(policy or {})}},
            "runtime": {"colocated": colocated},
        }
    )


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"engine": {"kind": "attached", "urls": ["http://10.0.0.5:1"]}}, "policies.main.engine is attached"),
        ({"publish": {"pause_mode": "in_place"}}, "policies.main.publish.pause_mode"),
        ({"engine": {"kind": "sglang"}}, "policies.main.engine.args.enable-memory-saver is missing"),
    ],
)
def test_engines_that_cannot_make_room_are_refused_by_name(tmp_path: Path, policy: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_colocated(_config(tmp_path, policy))
    check_colocated(_config(tmp_path, policy, colocated=False))


@pytest.mark.parametrize(
    "policy",
    [{}, {"engine": {"kind": "sglang", "args": {"enable_memory_saver": True}}}, {"publish": {"pause_mode": "retract"}}],
)
def test_engines_that_can_make_room_are_taken(tmp_path: Path, policy: dict) -> None:
    check_colocated(_config(tmp_path, policy))


@pytest.mark.parametrize(
    ("transport", "words"),
    [
        ({"kind": "tensors"}, r'policies.main.publish.transport.kind = "tensors" shares memory'),
        ({"kind": "delta"}, r'policies.main.publish.transport.kind = "delta" rebuilds weights on one host'),
        ({"kind": "broadcast", "master_address": "127.0.0.1"}, 'master_address = "127.0.0.1" .* set it to "auto"'),
    ],
)
def test_a_transport_that_ends_at_this_host_is_refused_where_there_are_several(
    tmp_path: Path, transport: dict, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_several_hosts(_config(tmp_path, {"publish": {"transport": transport}}))


@pytest.mark.parametrize("transport", [{"kind": "disk"}, {"kind": "broadcast"}])
def test_a_transport_that_reaches_other_hosts_is_taken(tmp_path: Path, transport: dict) -> None:
    check_several_hosts(_config(tmp_path, {"publish": {"transport": transport}}))


def test_a_server_of_environments_that_each_host_would_look_for_at_itself_is_named(tmp_path: Path) -> None:
    section = {"placement": "remote", "servers": ["http://10.0.0.5:1", "http://localhost:2"]}
    with pytest.raises(ConfigError, match=r"environments.thing.servers: http://localhost:2 .*all of them reach"):
        check_several_hosts(_config(tmp_path, environment=section))
