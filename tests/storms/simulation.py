"""A whole run on a virtual clock: the real controller over a scripted engine and a trainer that only takes time.

Replies have long-tailed latencies (95th percentile ten times the median), proportional to their lengths; both engine
and trainer are interrupted and published to like real ones. Controller, buffer, publisher, router, sessions, runner
and the SQL environment are the real ones. No figure depends on the machine.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.buffer.episode_buffer import BufferTerms, EnvironmentTerms, MemoryBuffer
from agentrl.buffer.ledger import Ledger, LedgerLine, read_ledger
from agentrl.buffer.mix import Mix
from agentrl.inference.fleet import Fleet
from agentrl.inference.router import EngineRouter
from agentrl.orchestration.assembly import PolicyParts, RunParts, StartPoint
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.controller import Controller
from agentrl.orchestration.players import build_hosts, build_scorers, build_tier
from agentrl.orchestration.recorder import Recorder, SilentObserver
from agentrl.orchestration.run_directory import RunDirectory
from agentrl.orchestration.run_journal import RunJournal
from agentrl.orchestration.scoring import Scoring
from agentrl.orchestration.serving import Serving
from agentrl.orchestration.worker_assembly import build_pool
from agentrl.process.local_place import LocalPlaces
from agentrl.protocols import Trainer
from agentrl.sandbox.keepers import SandboxKeepers
from agentrl.sandbox.starting import SandboxKeeper
from agentrl.tokens.chat import ChatFormat
from agentrl.types.batch import Receipt, StepReport, TrainBatch, WeightsManifest
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.generation import FinishReason, Generation, GenerationRequest
from agentrl.types.message import Message, Role
from agentrl.types.task import Task
from agentrl.types.version import PolicyVersion, VersionSpan
from agentrl.types.weights import WeightSource
from agentrl.weights.config import PublishConfig
from agentrl.weights.disk import DiskTransport
from agentrl.weights.publisher import StagedPublisher
from agentrl_environments.sql.experts import act_clean
from agentrl_environments.sql.tasks import SqlOptions
from tests.storms.task_sampling import task_sampler

FIRST = PolicyVersion(0, 0)
PLACES = 32
MEDIAN_FILLER_TOKENS = 32
TAIL = math.log(10) / 1.6449  # of a lognormal whose 95th percentile is ten times its median
SECONDS_PER_TOKEN = 1 / 40
TRAIN_STEP_S = 6.0
SWAP_S = 0.1
ATTEMPTS = 1000  # a naive system never gives an episode up
_STALENESS = "buffer/staleness_mean_steps"
MAX_FAILURES = 1_000_000  # in a row: more than any run has episodes


@dataclass(slots=True)
class TailEngine:
    """Replies word by word at a fixed speed; lengths are drawn by session and turn, whatever interrupts.

    `sample_task` gives the task of a group by its number, `slowness` how many times longer a token of it takes.
    """

    chat: ChatFormat
    sample_task: Callable[[int], Task]
    slowness: Callable[[int], float] = lambda group: 1.0
    name: str = "tail"
    version: PolicyVersion = FIRST
    busy_s: float = 0.0
    repeated_calls: Counter[str] = field(default_factory=Counter)
    _replies: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    _prompts: dict[tuple[str, int], int] = field(default_factory=dict)
    _pause: asyncio.Event = field(default_factory=asyncio.Event)
    _resume: asyncio.Event = field(default_factory=asyncio.Event)
    _in_flight: int = 0

    async def generate(self, request: GenerationRequest) -> Generation:
        started = asyncio.get_running_loop().time()
        if self._pause.is_set():
            await self._resume.wait()
        rest = self._rest(request)
        self._in_flight += 1
        part = await self._until_paused(rest, SECONDS_PER_TOKEN * self.slowness(group_of(request.session)))
        self._in_flight -= 1
        self.busy_s += asyncio.get_running_loop().time() - started
        spans = (VersionSpan(self.version, 0, len(part)),) if len(part) else ()
        finish = FinishReason.STOP if len(part) == len(rest) else FinishReason.ABORT
        return Generation(part, np.full(len(part), -0.1, np.float32), spans, spans, finish)

    async def pause(self) -> int:
        self._resume.clear()
        self._pause.set()
        return self._in_flight

    async def resume(self) -> None:
        self._pause.clear()
        self._resume.set()

    async def stage(self, source: WeightSource, version: PolicyVersion) -> None:
        """Nothing is taken ahead."""

    async def needs_pause(self) -> bool:
        return True

    async def swap(self, source: WeightSource, version: PolicyVersion) -> None:
        await asyncio.sleep(SWAP_S)
        self.version = version

    async def receipt(self) -> Receipt:
        return Receipt(self.name, self.version, {}, 0.0, 0)

    async def _until_paused(self, rest: np.ndarray, seconds_per_token: float) -> np.ndarray:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(len(rest) * seconds_per_token):
                await self._pause.wait()
        except TimeoutError:
            return rest
        return rest[: min(int((loop.time() - started) / seconds_per_token), len(rest) - 1)]

    def _rest(self, request: GenerationRequest) -> np.ndarray:
        """What is left of the reply that the request continues."""
        turn = sum(m.role is Role.ASSISTANT for m in request.conversation)
        key = (request.session, turn)
        if key not in self._replies:
            self._replies[key] = self.chat.complete(self._reply(request.session, request.conversation))
            self._prompts[key] = len(request.prompt_ids)
        return self._replies[key][len(request.prompt_ids) - self._prompts[key] :]

    def _reply(self, session: str, conversation: Sequence[Message]) -> Message:
        """What the expert says, behind filler of a length that session and turn decide."""
        task = self.sample_task(group_of(session))
        message = act_clean(SqlOptions(), task, conversation, random.Random(0))
        turn = sum(m.role is Role.ASSISTANT for m in conversation)
        filler = " ".join(["what"] * filler_words(session, turn))
        return Message(Role.ASSISTANT, f"{filler} {message.content}", message.tool_calls)

    def intended_lengths(self) -> dict[str, int]:
        """Words of filler in the three turns of each episode, whether or not it got that far."""
        sessions = {session for session, _turn in self._replies}
        return {session.split("/")[1]: sum(filler_words(session, turn) for turn in range(3)) for session in sessions}


@dataclass(slots=True)
class NaiveEngine(TailEngine):
    """Continues no reply of an episode that began more than `max_steps` versions ago."""

    max_steps: int = 0
    _began: dict[str, int] = field(default_factory=dict)

    def _rest(self, request: GenerationRequest) -> np.ndarray:
        began = self._began.setdefault(request.session, self.version.step)
        if self.version.step - began > self.max_steps:
            raise EpisodeError(Boundary.ENGINE, "discarded", f"began {self.version.step - began} steps ago")
        return TailEngine._rest(self, request)


def group_of(session: str) -> int:
    """Number of a session's group."""
    return int(session.split("/")[1].split("-")[1])


def filler_words(session: str, turn: int) -> int:
    draw = random.Random(f"{session}/{turn}").gauss(0.0, TAIL)
    return max(1, round(MEDIAN_FILLER_TOKENS / 2 * math.exp(draw)))


@dataclass(frozen=True, slots=True)
class MixedTasks:
    """The tasks of several environments, made in no time."""

    samplers: Mapping[str, Callable[[int], Task]]
    order: Mix

    def get(self, environment: str, ordinal: int) -> Task:
        return self.samplers[environment](ordinal)

    def listen(self, on_arrival: Callable[[], Awaitable[None]]) -> None:
        """Nothing arrives later."""

    def of_group(self, number: int) -> Task:
        return self.get(*self.order.of(number))


@dataclass(slots=True)
class TimedTrainer:
    """Takes its time and changes nothing."""

    async def step(self, batch: TrainBatch) -> StepReport:
        await asyncio.sleep(TRAIN_STEP_S)
        return StepReport(batch.version.next())

    async def stage(self, version: PolicyVersion, folder: Path) -> WeightsManifest:
        folder.mkdir(parents=True)
        return WeightsManifest("main", version, str(folder), {}, 0)

    async def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True, slots=True)
class Machine:
    """A runtime in which nothing ever dies."""

    async def watch(self) -> None:
        await asyncio.Event().wait()


@dataclass(frozen=True, slots=True)
class Simulation:
    """A run that is over. `intended_lengths` are those of the script by episode, of unfinished ones too.

    `staleness` has the mean of the sampled tokens of each step.
    """

    lines: list[LedgerLine]
    intended_lengths: dict[str, int]
    seconds: float
    slot_utilisation: float
    staleness: list[float]


def run_config(model: Path, folder: Path, steps: int, seed: int, **buffer: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "simulation",
            "seed": seed,
            "steps": steps,
            "runs_folder": folder,
            "policies": {"main": {"model": model, "chat": {"renderer": "qwen3"}}},
            "environment": {"name": "sql", "placement": "inline"},
            "rollout": {
                "concurrency": PLACES,
                "limits": {"max_context_tokens": 1 << 20, "max_reply_tokens": 1 << 20, "total_s": 1e6},
            },
            "buffer": {**buffer, "stall_s": 1e6},
            "evaluation": {"interval_steps": 0, "final_tasks": 0},
            "checkpoint": {"interval_steps": 1_000_000},
        }
    )


async def simulate(
    config: RunConfig,
    chat: ChatFormat,
    engine_kind: Callable[..., TailEngine] = TailEngine,
    max_attempts: int = 1,
    slowness: Mapping[str, float] | None = None,
    trainer: Trainer | None = None,
) -> Simulation:
    """A whole run by the real controller over the scripted engine and trainer; see `run_virtual`.

    `slowness` says of environments how many times longer their tokens take; `trainer` stands in for `TimedTrainer`.
    """
    run = RunDirectory.create(config)
    recorder = Recorder(run, config.name, SilentObserver())
    sections = config.environments
    tasks = MixedTasks(
        {name: task_sampler(section, config.seed) for name, section in sections.items()},
        Mix({name: section.weight for name, section in sections.items()}),
    )
    times = slowness or {}
    engine = engine_kind(chat, tasks.of_group, lambda group: times.get(tasks.order.of(group)[0], 1.0))
    fleet = Fleet([engine], FIRST)
    router = EngineRouter(fleet)
    publisher = StagedPublisher(fleet, DiskTransport(), PublishConfig(), WeightsManifest("main", FIRST, "", {}, 0))
    environments = {name: EnvironmentTerms(section.weight, ("main",)) for name, section in sections.items()}
    terms = BufferTerms(
        {"main": config.buffer},
        environments,
        {"main": FIRST},
        config.seed,
        config.rollout.concurrency,
        max_attempts,
        MAX_FAILURES,
    )
    buffer = MemoryBuffer(terms, tasks, {}, Ledger(recorder.write_ledger_line))
    recorder.follow({"main": list(sections)})
    hosts, journal = await build_hosts(config, run.logs), RunJournal.none()
    tier = build_tier(config, {}, {}, run.logs, journal.buffer, {}, LocalPlaces())
    await tier.open()
    own = SandboxKeeper(config.sandbox, run.path.name, run.path / "no-socket", None)
    parts = RunParts(
        config=config,
        run=run,
        start=StartPoint({"main": FIRST}),
        runtime=Machine(),
        hosts=hosts,
        policies={"main": PolicyParts(Serving(fleet, router, publisher, ()), trainer or TimedTrainer())},
        buffer=buffer,
        pool=build_pool(config, run.logs, {"main": router}, {"main": chat}, hosts, journal, LocalPlaces(), tier.played),
        scoring=Scoring(build_scorers(config), journal.buffer, tier),
        evaluator=None,
        recorder=recorder,
        observer=SilentObserver(),
        journal=journal,
        keepers=SandboxKeepers(own, config.sandbox, config.name, run.logs, LocalPlaces(), ()),
        services=(tier.run,),
    )
    started = asyncio.get_running_loop().time()
    await Controller(parts).run()
    seconds = asyncio.get_running_loop().time() - started
    recorder.close()
    lines = read_ledger(run.path / "ledger.jsonl")
    rows = map(json.loads, run.metrics.read_text().splitlines())
    staleness = [row[_STALENESS] for row in rows if _STALENESS in row]
    return Simulation(
        lines, engine.intended_lengths(), seconds, engine.busy_s / (config.rollout.concurrency * seconds), staleness
    )
