"""Every seam on one page: coroutines over records of `agentrl.types`, safe to repeat, each with a deadline."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

from agentrl.types.batch import Canary, Receipt, StepReport, TrainBatch, WeightsManifest
from agentrl.types.environment import EnvironmentDescription, Opening, Origin, Score, StepResult
from agentrl.types.episode import Episode, Ticket
from agentrl.types.generation import Generation, GenerationRequest
from agentrl.types.message import Message, ToolSpec
from agentrl.types.program import GatewayAccess
from agentrl.types.rollout import Assignment, WorkerEvent
from agentrl.types.sandbox import Command, CommandResult
from agentrl.types.task import Split, Task
from agentrl.types.turn_score import ScoredTurn, TurnScore
from agentrl.types.version import PolicyVersion
from agentrl.types.weights import WeightGroup, WeightSource


class Closing(Protocol):
    """Holds something until it is closed."""

    async def close(self) -> None:
        """Free or end all that it holds; safe to call twice."""


class Engine(Protocol):
    """Serves a policy: token ids in, token ids out."""

    name: str

    @property
    def repeated_calls(self) -> Counter[str]:
        """Control calls that were sent again because their answer was lost."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Continue a prompt; an interrupted request returns what it has, with finish ABORT."""

    async def score(self, token_ids: Sequence[int], start: int = 1) -> list[float]:
        """Log-probabilities of tokens `start` to n-1, each given those before it, at temperature 1."""

    async def pause(self) -> int:
        """Stop generating, giving back what is in flight; returns how many were interrupted."""

    async def count_requests(self) -> int | None:
        """Requests that it runs or queues, of whomever; None if it does not say."""

    async def resume(self) -> None:
        """Generate again."""

    async def release_memory(self) -> None:
        """Give back the memory of the KV cache; paused, and with nothing in flight."""

    async def resume_memory(self) -> None:
        """Take that memory again, before `resume`."""

    async def abort_all(self) -> None:
        """Give back everything in flight, queued or paused."""

    async def abort(self, rid: str) -> None:
        """Give back what is in flight under an id; none is no error."""

    async def stage(self, source: WeightSource, version: PolicyVersion) -> None:
        """Take new weights as far as the server can while it generates; they are served after `swap`."""

    async def needs_pause(self) -> bool:
        """Whether it must be paused for the swap of what was staged last."""

    async def swap(self, source: WeightSource, version: PolicyVersion) -> None:
        """Serve new weights and flush the KV cache, or freeze requests with theirs, as the engine is configured."""

    async def join_group(self, group: WeightGroup) -> None:
        """Join a group through which weights are broadcast."""

    async def leave_group(self, name: str) -> None:
        """Leave such a group."""

    async def rename(self, version: PolicyVersion) -> None:
        """Call the weights that are served another version, which has the same; interrupts nothing."""

    async def load_adapter(self, path: str, version: PolicyVersion) -> None:
        """Take a LoRA adapter from a folder; generations that begin later use it."""

    async def receipt(self) -> Receipt:
        """What is served now: version and checksums, from the engine itself."""

    async def ping(self) -> None:
        """Whether its process answers, paused or not."""

    async def probe(self) -> PolicyVersion:
        """Whether it is well, and the version that it serves; not while paused."""


class Environment(Closing, Protocol):
    """Answers one agent's actions; single use."""

    async def start(self) -> Opening:
        """Pose the task."""

    async def step(self, action: Message) -> StepResult:
        """React to one assistant message."""

    async def score(self) -> Score:
        """Judge the episode; called once, after the last step."""


@runtime_checkable
class AttachableEnvironment(Environment, Protocol):
    """An environment with a session that outlives its worker."""

    async def handle(self) -> str | None:
        """Names the live session, so that it can be reattached; None for one that cannot."""

    async def detach(self) -> None:
        """Leave the session alive: a `close` that follows frees only what is on this side."""

    async def outcome(self, step: int, effect_ids: Sequence[str]) -> StepResult | None:
        """The result of the session's `step`-th step, from 0, with or without effects; None if it never arrived."""


@runtime_checkable
class SnapshotEnvironment(Environment, Protocol):
    """An environment that gives its state away."""

    async def snapshot(self) -> bytes:
        """The whole state."""


@runtime_checkable
class ProgramEnvironment(Environment, Protocol):
    """An environment in whose sandbox a scaffold runs programs."""

    async def run(self, command: Command, effect_id: str) -> CommandResult:
        """Run a scaffold's program in the agent's sandbox, at most once under this id. Raises EpisodeError."""

    async def stop(self, effect_id: str) -> None:
        """End such a program, also while `run` waits for it, which gives its result then. Raises EpisodeError."""


class DurableEnvironment(AttachableEnvironment, SnapshotEnvironment, ProgramEnvironment, Protocol):
    """An environment as episodes see it; which of the further calls it serves, its host's `description` says."""


class EnvironmentHost(Closing, Protocol):
    """Where environments of one kind live."""

    description: EnvironmentDescription

    async def sample(self, split: Split, seed: int, ordinals: Sequence[int]) -> list[Task]:
        """Tasks of a split in a run's order, counted from 0 through all epochs. Raises ConfigError or EpisodeError."""

    def open(self, task: Task, origin: Origin | None = None) -> AbstractAsyncContextManager[DurableEnvironment]:
        """An environment for one episode, fresh or from its origin; freed, or killed, at the end of the block."""


class Sandbox(Closing, Protocol):
    """Where an episode's commands run; it outlives the process that uses it, for a while."""

    async def run(self, command: Command, effect_id: str) -> CommandResult:
        """Run a command at most once under this id; a second call gives the first one's result. Raises EpisodeError."""

    async def outcome(self, effect_id: str) -> CommandResult | None:
        """What became of a command, waiting for its end; None if it was never begun."""

    async def stop(self, effect_id: str) -> None:
        """End a command, also while `run` waits, which gives ended STOPPED then. One yet to begin never will."""

    async def write(self, path: str, content: AsyncIterable[bytes]) -> None:
        """Write a file. Raises EpisodeError (boundary sandbox, kind files) if it cannot be."""

    def read(self, path: str) -> AsyncIterator[bytes]:
        """The content of a file. Raises EpisodeError (boundary sandbox, kind files) if it cannot be read."""

    async def unpack(self, archive: AsyncIterable[bytes], folder: str) -> None:
        """Unpack a tar archive. Raises EpisodeError (kind files), also if a member of it is outside the folder."""

    def pack(self, folder: str) -> AsyncIterator[bytes]:
        """A folder as a tar archive, which nobody has checked: read it by `agentrl.sandbox.archives`."""

    async def snapshot(self) -> str:
        """Keep the files as they are; the name opens sandboxes that begin with them, until it is forgotten."""

    async def remember(self, state: bytes) -> None:
        """Keep some bytes beside the sandbox, out of the reach of its commands."""

    async def recall(self) -> bytes | None:
        """What was kept last."""

    def handle(self) -> str:
        """Names the live sandbox, so that it can be attached to from another process."""

    async def keep(self) -> str:
        """Let it live on for others when this process is gone; until then it would soon end. Returns the handle."""

    async def detach(self) -> None:
        """Leave it alive: a `close` that follows frees only what is on this side."""


class AgentContext(Protocol):
    """One agent's conversation with the policy that it acts by."""

    @property
    def context_tokens(self) -> int:
        """Tokens of the conversation so far, the same when the episode is resumed."""

    async def generate(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Message:
        """Put messages behind the conversation and let the policy reply."""

    async def rewrite(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Message:
        """Replace the conversation and let the policy reply; opens a branch of the episode."""


class ScaffoldContext(AgentContext, Protocol):
    """A scaffold's only way to the world: replies, effects, time and chance. Its own calls are of the first agent."""

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents that act in the episode, in the recipe's order."""

    def agent(self, name: str) -> AgentContext:
        """An agent's conversation. Agents of one episode act one after the other."""

    async def start(self) -> Opening:
        """The environment's opening."""

    async def step(self, action: Message) -> StepResult:
        """Act: intents are committed before the environment sees them, results after. Calls of an empty id get one."""

    def gateway(self) -> AbstractAsyncContextManager[GatewayAccess]:
        """Let programs call the agents' policies by HTTP, within the block; such an episode is not resumed."""

    async def run(self, command: Command) -> CommandResult:
        """Run a program in the environment's sandbox; a limit or a failure of its calls ends it, and the episode."""

    def time(self) -> float:
        """Seconds of generation and environment since the episode began, the same when it is resumed."""

    @property
    def random(self) -> random.Random:
        """Chance, seeded by the episode."""


@runtime_checkable
class Scaffold(Protocol):
    """The program that makes an agent of a policy. It keeps no state between episodes."""

    async def run(self, context: ScaffoldContext) -> None:
        """Play one episode to its end."""


class RolloutWorker(Closing, Protocol):
    """Plays episodes, here or on another `node`, where their live sessions are: assignments in, events out."""

    name: str
    node: str

    async def assign(self, assignment: Assignment) -> None:
        """Play an episode; all that becomes of it is told by events that bear its token."""

    async def next_event(self) -> WorkerEvent:
        """The next event, in the order in which they happen. Raises WorkerLostError once its process is gone."""

    def park(self) -> None:
        """Leave every episode at its next safe place."""

    def end(self) -> None:
        """Nobody will resume what is cut off from now on."""

    async def cut_off(self, episode_id: str) -> Episode | None:
        """Stop an episode where it is; returns it as it stands, or None if it is not played here."""


class Verifying(Protocol):
    """A scorer that asks the live environment, at the end of play. `weight` is its part in the reward."""

    name: str
    weight: float

    async def score(self, environment: Environment) -> Score:
        """The score of the episode that `environment` has just played."""


class Scorer(Closing, Protocol):
    """Judges turns while their episodes are played, several at a time."""

    async def score(self, turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        """What it says of each, in order; one that it cannot judge has a failure. Raises EpisodeError for all."""


class EpisodeBuffer(Protocol):
    """Where episodes live from admission to training; owns admission and the staleness bound."""

    async def admit(self) -> Ticket:
        """Leave to start the next episode. Waits for: a free place. Unblocked by: release, loaded, settle."""

    async def release(self, ticket: Ticket) -> None:
        """The episode generates no more; its place is free, its score may still be on the way."""

    async def settle(self, episode: Episode) -> None:
        """The episode is over, scored or failed."""

    async def take(self, policy: str, version: PolicyVersion) -> TrainBatch:
        """A policy's batch for this step. Waits for: complete groups. Raises StalledError if none can come."""

    async def trained(self, policy: str, version: PolicyVersion) -> None:
        """The taken batch is part of this version."""

    async def loaded(self, policy: str, version: PolicyVersion) -> None:
        """Engines now serve this version; places come back."""

    async def finish(self, policy: str) -> None:
        """The policy takes no more; the others go on without it."""


class Trainer(Closing, Protocol):
    """Turns version v of one policy into v+1."""

    async def step(self, batch: TrainBatch, is_redo: bool = False) -> StepReport:
        """Learn from one batch; a redo repeats a step that is on record."""

    async def canary(self, token_ids: list[int]) -> Canary:
        """What the current weights say of some tokens, for engines to repeat."""

    async def stage(self, version: PolicyVersion, folder: Path) -> WeightsManifest:
        """Write the current weights where engines can read them."""

    async def save(self, folder: Path) -> None:
        """Write weights and optimizer so that `restore` goes on exactly here."""

    async def restore(self, folder: Path) -> None:
        """Go on from what `save` wrote."""

    async def rebase(self, version: PolicyVersion) -> None:
        """Call the present weights a version of a later epoch."""


class WeightTransport(Closing, Protocol):
    """Moves staged weights into engines, each by itself; `sent_bytes` counts what was moved."""

    sent_bytes: int

    async def needs_pause(self, engine: Engine) -> bool:
        """Whether the engine must stand still for it."""

    async def prepare(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Bring the weights as near to the engine as can be while it generates."""

    async def send(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Bring the weights into an engine, paused if it needs to be."""

    async def forget(self, engine: str) -> None:
        """The engine has failed: give up what is kept for it; safe to call twice."""


class Publisher(Protocol):
    """Brings new weights to all engines of a policy, each by itself, and proves it."""

    async def publish(self, manifest: WeightsManifest) -> Sequence[Receipt]:
        """Returns once every engine serves it or is set aside. Raises PublishError if none serves it."""


class Runtime(Closing, Protocol):
    """Starts the components of a run somewhere and ends them; one for other machines changes nothing else."""

    async def start_engines(self, policy: str, model: Path, version: PolicyVersion) -> Sequence[Engine]:
        """The engines that serve a policy's rollouts."""

    async def start_side_engine(self, role: str, policy: str, model: Path, version: PolicyVersion) -> Engine:
        """An engine of a policy apart from the rollouts', for evaluations or a scorer; nothing replaces it."""

    async def start_trainer(self, policy: str, model: Path, version: PolicyVersion) -> Trainer:
        """The ranks that train a policy."""

    async def engine_ended(self, name: str) -> str:
        """Waits for: the end of an engine's process. Returns how it ended; never for engines of others."""

    async def revive_engine(self, name: str) -> Engine:
        """A new process for a dead one, or the same once it answers again. Raises EngineError if it stays away."""

    async def watch(self) -> None:
        """Waits for: the death of what cannot be replaced. Raises EngineError or PlacesLostError then."""


class MetricSink(Protocol):
    """Takes scalars at a step; owns no policy on what they mean."""

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Record scalars named ``area/quantity_unit``."""

    def close(self) -> None:
        """Flush and close; safe to call twice."""
