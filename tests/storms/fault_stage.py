"""Two real engines under load, watched, published to and brought back like a run's, with a place for faults."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentrl.inference.checksum import tensor_checksum
from agentrl.inference.config import ClientConfig, EmbeddedEngineConfig, FleetConfig, StartedEngineConfig
from agentrl.inference.fleet import Fleet, Member
from agentrl.inference.router import EngineRouter
from agentrl.inference.supervision import FleetSupervisor
from agentrl.orchestration.commands import EngineLaunch
from agentrl.orchestration.engines import EngineProcess
from agentrl.process.local_place import LocalPlace
from agentrl.rollouts.episode_log import NoLog
from agentrl.rollouts.record import EpisodeRecord
from agentrl.rollouts.replies import ContextFullError, session_key
from agentrl.rollouts.session import Session
from agentrl.testing.builders import build_ticket
from agentrl.testing.chaos import ChaosEngine, Victim
from agentrl.testing.tiny import tiny_chat
from agentrl.types.batch import Canary, Receipt, WeightsManifest
from agentrl.types.episode import Agent, Episode
from agentrl.types.errors import EngineError, EpisodeError
from agentrl.types.generation import Generation, GenerationRequest, Sampling
from agentrl.types.message import Message, Role
from agentrl.types.task import Limits
from agentrl.types.trajectory import build_trajectories
from agentrl.types.version import PolicyVersion
from agentrl.weights.config import PublishConfig
from agentrl.weights.disk import DiskTransport
from agentrl.weights.publisher import StagedPublisher
from agentrl.weights.receipts import ReceiptBook
from agentrl.weights.resync import Resynchronizer
from tests.servers.sglang import sglang_config
from tests.storms.token_verdict import find_max_gap

FIRST = PolicyVersion(0, 0)
LIMITS = Limits(max_turns=1 << 20, max_context_tokens=600, max_reply_tokens=80, tool_s=1.0, total_s=600.0)
CANARY_IDS = tuple(range(20, 44))
QUESTION = Message(Role.USER, "what is the count?")


@dataclass(frozen=True)
class Setting:
    """What plays, and by what clock: engines, deadlines of calls, when an engine counts as lost.

    `calm_s` lies between two publications.
    """

    engine: StartedEngineConfig
    client: ClientConfig
    watch: FleetConfig
    calm_s: float


EMBEDDED = Setting(
    EmbeddedEngineConfig(args={"max_running_requests": 8}),
    ClientConfig(generate_s=60.0, control_s=2.0, load_s=4.0, connect_s=1.0),
    FleetConfig(probe_s=0.5, suspect_s=1.5, dead_s=3.0, wait_s=60.0),
    calm_s=0.2,
)


def sglang_setting() -> Setting:
    """Two tiny servers on a CPU; a pause takes them a second."""
    return Setting(
        sglang_config("dense", max_running_requests=8),
        ClientConfig(generate_s=120.0, control_s=8.0, load_s=20.0, connect_s=2.0),
        FleetConfig(probe_s=1.0, suspect_s=4.0, dead_s=8.0, wait_s=240.0),
        calm_s=1.0,
    )


@dataclass
class Stage:
    """Everything that plays, and what it has done so far; `wrong` are weights that nobody publishes."""

    models: tuple[Path, Path]
    wrong: Path
    logs: Path
    setting: Setting = EMBEDDED
    publish: PublishConfig = field(default_factory=PublishConfig)
    max_restarts: int = 1000
    processes: dict[str, EngineProcess] = field(default_factory=dict)
    actors: dict[str, ChaosEngine] = field(default_factory=dict)
    episodes: list[Episode] = field(default_factory=list)
    heard_at: dict[int, float] = field(default_factory=dict)
    replied_at: dict[int, float] = field(default_factory=dict)
    failed_episodes: list[str] = field(default_factory=list)
    fleet: Fleet = field(init=False)
    router: EngineRouter = field(init=False)
    publisher: StagedPublisher = field(init=False)

    async def start(self, *names: str) -> None:
        await asyncio.gather(*(self._launch(name) for name in names))
        self.fleet = Fleet(self.actors.values(), FIRST)
        for name, actor in self.actors.items():
            actor.turn = self.fleet.members[name].update_lock
        self.router = EngineRouter(self.fleet, self.setting.watch.wait_s)
        self.publisher = self._make_publisher(StagedPublisher)

    async def publish_with(self, publisher: type[StagedPublisher]) -> None:
        """Take another publisher from now on."""
        await self.publisher.close()
        self.publisher = self._make_publisher(publisher)

    async def engine_ended(self, name: str) -> str:
        return await self.processes[name].ended()

    async def revive_engine(self, name: str) -> ChaosEngine:
        await self.processes[name].close()
        if self.max_restarts == 0:
            raise EngineError("max_restarts = 0 allows no further start")
        self.max_restarts -= 1
        actor = await self._launch(name)
        actor.turn = self.fleet.members[name].update_lock
        return actor

    async def publish_for_ever(self) -> None:
        """Publish one weight set after the other."""
        newest = max(member.version.step for member in self.fleet.members.values())
        for step in itertools.count(newest + 1):
            await self.publisher.publish(make_manifest(self.models[step % 2], PolicyVersion(0, step)))
            await asyncio.sleep(self.setting.calm_s)

    async def talk_for_ever(self, number: int) -> None:
        """Play episodes to the end of their contexts.

        `heard_at` tells when this player last had new tokens, `replied_at` when a whole reply.
        """
        chat = tiny_chat(self.models[0])
        ear = _Ear(self, number)
        for played in itertools.count():
            record = EpisodeRecord(build_ticket(f"fault-{number}-{played}"), (Agent("agent", "main"),))
            session = Session(record, "agent", chat, ear, Sampling(), LIMITS, NoLog())
            try:
                while True:
                    await session.generate([QUESTION])
                    self.replied_at[number] = time.monotonic()
            except ContextFullError:
                pass
            except EpisodeError as error:
                self.failed_episodes.append(str(error))
            self.router.end_session(session_key(record.ticket, "agent"))
            self.episodes.append(record.close(0.0))

    def max_gap(self) -> float:
        """Largest difference in nats between a committed log-probability and that of its span's weights."""
        return find_max_gap([t for episode in self.episodes for t in build_trajectories(episode)], self.models)

    def unproven_spans(self) -> int:
        """Committed spans of the first version in episodes that begin with a later one: weights that came back."""
        spans = [t.versions for episode in self.episodes for t in build_trajectories(episode) if t.versions]
        return sum(span.version == FIRST for row in spans if row[0].version != FIRST for span in row)

    async def close(self) -> None:
        for process in self.processes.values():
            await process.close()

    def _make_publisher(self, publisher: type[StagedPublisher]) -> StagedPublisher:
        newest = max(member.version for member in self.fleet.members.values())
        held = make_manifest(self.models[newest.step % 2], newest)
        return publisher(self.fleet, DiskTransport(), self.publish, held, self.setting.watch.wait_s)

    async def _launch(self, name: str) -> ChaosEngine:
        launch = EngineLaunch("main", name, self.models[0], FIRST, self.setting.engine, False, self.logs)
        process = await EngineProcess.start(launch, self.setting.client, LocalPlace())
        victim = Victim(process.pid, self.wrong, self.models[0], FIRST)
        self.processes[name] = process
        self.actors[name] = ChaosEngine(process.client, victim)
        return self.actors[name]


@dataclass(frozen=True)
class _Ear:
    """The stage's router as one player has it: notes when tokens come, be it a whole reply or what an abort left."""

    stage: Stage
    number: int

    async def generate(self, request: GenerationRequest) -> Generation:
        generation = await self.stage.router.generate(request)
        if len(generation.token_ids):
            self.stage.heard_at[self.number] = time.monotonic()
        return generation


class _BlindBook(ReceiptBook):
    def check(self, receipt: Receipt, manifest: WeightsManifest) -> None:
        return


class TrustingPublisher(StagedPublisher):
    """The protection switched off: nothing is compared, neither digests nor the canary."""

    async def _sync(self, member: Member, manifest: WeightsManifest) -> Receipt | str:
        self._book = _BlindBook()
        return await super()._sync(member, dataclasses.replace(manifest, canary=None))


class OpenRouter(EngineRouter):
    """The protection switched off: whatever version a reply names, it passes."""

    async def _passes_fence(self, member: Member, since: PolicyVersion, generation: Generation) -> bool:
        return True


@asynccontextmanager
async def started(stage: Stage, *names: str) -> AsyncIterator[None]:
    """The stage's engines by these names, until the block ends."""
    try:
        await stage.start(*names)
        yield
    finally:
        await stage.close()


@asynccontextmanager
async def playing(stage: Stage, num_players: int) -> AsyncIterator[asyncio.Task[None]]:
    """The stage in full play; the task ends only by the error that would end a run."""

    async def play() -> None:
        supervisor = FleetSupervisor(stage.fleet, stage, stage.setting.watch)
        resynchronizer = Resynchronizer(stage.fleet, stage.publisher)
        async with asyncio.TaskGroup() as group:
            group.create_task(supervisor.run())
            group.create_task(resynchronizer.run())
            group.create_task(stage.publish_for_ever())
            for number in range(num_players):
                group.create_task(stage.talk_for_ever(number))

    task = asyncio.create_task(play())
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, BaseExceptionGroup):
            await task


def make_manifest(folder: Path, version: PolicyVersion) -> WeightsManifest:
    tensors = load_file(folder / "model.safetensors")
    checksums = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
    return WeightsManifest("main", version, str(folder), checksums, 0, make_canary(folder))


@functools.cache
@torch.no_grad()
def make_canary(folder: Path) -> Canary:
    """What a trainer would say of a few tokens."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logprobs_TV = network(torch.tensor([CANARY_IDS])).logits[0].log_softmax(-1)
    picked = logprobs_TV[:-1].gather(1, torch.tensor(CANARY_IDS[1:])[:, None])[:, 0]
    next_logprobs, next_ids = logprobs_TV[-1].topk(16)
    return Canary(CANARY_IDS, tuple(picked.tolist()), tuple(next_ids.tolist()), tuple(next_logprobs.tolist()))
