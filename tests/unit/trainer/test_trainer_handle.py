from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.process.local_place import LocalPlace, LocalProcess
from agentrl.process.place import PlaceLostError, ProcessLaunch
from agentrl.process.remote import ProcessDiedError, RemoteCallError
from agentrl.process.server import Reply
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.handle import TrainerHandle, meeting_point
from agentrl.types.errors import ConfigError, StorageError, TrainerError
from agentrl.types.version import FIRST_VERSION

HANGS = object()


class ScriptedRank:
    """A rank whose calls end as told: an answer, an error, or not before the rank is killed."""

    log = Path("rank.log")

    def __init__(self, end: Any, passes: int = 0) -> None:
        self._end, self._passes = end, passes
        self._killed = asyncio.Event()

    @property
    def is_killed(self) -> bool:
        return self._killed.is_set()

    async def call_encoded(self, method: str, request: bytes, result: type, deadline_s: float) -> Any:
        for _ in range(self._passes):
            await asyncio.sleep(0)
        if self._end is HANGS:
            await self._killed.wait()
            raise ProcessDiedError("killed by the handle")
        if isinstance(self._end, BaseException):
            raise self._end
        return self._end

    def kill(self) -> None:
        self._killed.set()


def remote(error: str, message: str = "why") -> RemoteCallError:
    return RemoteCallError("trainer-main-0", "step", Reply(error=error, message=message, trace="the trace"))


def handle_of(*ranks: ScriptedRank) -> TrainerHandle:
    return TrainerHandle("main", TrainerConfig(), ranks, Path("rendezvous"))


async def test_the_answer_is_that_of_the_first_rank():
    assert await handle_of(ScriptedRank(1.5, passes=3), ScriptedRank(2.5)).supervised_loss([]) == 1.5


async def test_a_dead_rank_is_named_even_when_another_complained_of_it_first():
    ranks = (
        ScriptedRank(remote("RuntimeError", "connection closed by peer")),
        ScriptedRank(ProcessDiedError("process trainer-main-1 ended (signal 9)"), passes=20),
    )
    with pytest.raises(TrainerError, match="process trainer-main-1 ended"):
        await handle_of(*ranks).save(Path("x"))


async def test_a_failure_of_one_rank_ends_the_others_and_is_the_one_that_is_told():
    ranks = ScriptedRank(HANGS), ScriptedRank(remote("ValueError", "the batch is for another version"))
    with pytest.raises(TrainerError, match=r"policy 'main': .*ValueError: the batch is for another version\nthe trace"):
        await handle_of(*ranks).save(Path("x"))
    assert all(rank.is_killed for rank in ranks)


@pytest.mark.parametrize("kind", [ConfigError, StorageError, TrainerError])
async def test_our_own_errors_keep_their_kind_and_words(kind):
    with pytest.raises(kind, match=r"^why$"):
        await handle_of(ScriptedRank(remote(kind.__name__))).save(Path("x"))


async def test_a_missed_deadline_names_the_setting_that_raises_it():
    message = r"save took longer than 600 s; see rank\.log, or raise trainer\.deadlines\.step_s"
    with pytest.raises(TrainerError, match=message):
        await handle_of(ScriptedRank(TimeoutError())).save(Path("x"))


async def test_a_cancelled_call_ends_the_ranks():
    ranks = ScriptedRank(HANGS), ScriptedRank(HANGS)
    call = asyncio.create_task(handle_of(*ranks).save(Path("x")))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert all(rank.is_killed for rank in ranks)


class OtherPlace(LocalPlace):
    """A place of another machine, which is lost before a second process starts there."""

    def __init__(self, host: str) -> None:
        self._host, self.launches = host, []

    @property
    def host(self) -> str:
        return self._host

    async def start(self, launch: ProcessLaunch) -> LocalProcess:
        self.launches.append(launch)
        if len(self.launches) == 2:
            raise PlaceLostError("node 10.0.0.3 is gone")
        return await super().start(ProcessLaunch(launch.name, ("-c", "import time; time.sleep(600)")))

    async def free_port(self) -> int:
        return 21774


async def test_ranks_of_one_machine_meet_by_a_file_and_others_at_the_first(tmp_path):
    assert await meeting_point([LocalPlace(), LocalPlace()], tmp_path) == str(tmp_path)
    places = [OtherPlace("10.0.0.3"), OtherPlace("10.0.0.4")]
    assert await meeting_point(places, tmp_path) == "tcp://10.0.0.3:21774"


async def test_a_lost_place_ends_the_ranks_that_were_started_and_those_at_one_place_have_a_device_each(
    tmp_path, monkeypatch
):
    started = []
    monkeypatch.setattr(TrainerHandle, "kill", lambda handle: started.extend(handle._ranks))
    place, config = OtherPlace("10.0.0.3"), TrainerConfig(ranks=3)
    with pytest.raises(TrainerError, match=r"trainer of policy 'main': node 10\.0\.0\.3 is gone"):
        await TrainerHandle.start(
            "main", tmp_path, FIRST_VERSION, config, AlgorithmConfig(), 1.0, tmp_path, [OtherPlace("x"), place, place]
        )
    assert [rank.name for rank in started] == ["trainer-main-0", "trainer-main-1"]
    for rank in started:
        rank.kill()
    specs = [msgspec.json.decode(launch.argv[-1]) for launch in place.launches]
    assert [(s["rank"], s["num_ranks"], s["device"], s["num_devices"]) for s in specs] == [(1, 3, 0, 2), (2, 3, 1, 2)]
    assert {(spec["host"], spec["rendezvous"]) for spec in specs} == {("10.0.0.3", "tcp://x:21774")}
