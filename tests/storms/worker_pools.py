"""Pools of worker processes with a scripted engine in the driver: what real runs have, without model and trainer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.inference.fleet import Fleet
from agentrl.inference.router import EngineRouter
from agentrl.journal.claim import Claim
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.players import build_hosts, build_scorers, build_tier
from agentrl.orchestration.run_directory import Progress, RunDirectory
from agentrl.orchestration.run_journal import RunJournal
from agentrl.orchestration.scoring import Scoring
from agentrl.orchestration.worker_assembly import build_pool, num_processes
from agentrl.orchestration.worker_handle import WorkerProcess
from agentrl.orchestration.worker_pool import WorkerPool
from agentrl.process.local_place import LocalPlaces
from agentrl.process.place import Places
from agentrl.protocols import EnvironmentHost
from agentrl.testing.scripted import ScriptedEngine
from agentrl.tokens.chat import ChatFormat
from agentrl.types.episode import Episode, Ticket
from agentrl.types.generation import FinishReason, Generation, GenerationRequest
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.task import Task
from agentrl.types.version import PolicyVersion, VersionSpan
from tests.storms.task_sampling import task_sampler

FIRST = PolicyVersion(0, 0)
HERE = LocalPlaces()
DIALOGUE = (
    Message(Role.ASSISTANT, "", (ToolCall("", "schema", {}),)),
    Message(Role.ASSISTANT, "", (ToolCall("", "query", {"sql": "SELECT count(*) FROM sqlite_master"}),)),
    Message(Role.ASSISTANT, "", (ToolCall("", "query", {"sql": "SELECT name FROM sqlite_master"}),)),
    Message(Role.ASSISTANT, "the answer is 93"),
)


class DialogueEngine(ScriptedEngine):
    """Says the same to everybody, turn by turn; it tells turns by the prompt, since no text comes to an engine.

    What is said from `held_turn` on waits for `released`.
    """

    def __init__(self, chat: ChatFormat, dialogue: Sequence[Message], delay_s: float = 0.0) -> None:
        super().__init__(chat, lambda session, messages: dialogue[-1], FIRST)
        self._replies = [chat.complete(message) for message in dialogue]
        self._ends, self._delay_s = np.asarray(chat.stop_token_ids), delay_s
        self.requests: Counter[tuple[str, int]] = Counter()
        self.held_turn = len(dialogue)
        self.released = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> Generation:
        # Tools and question end twice before the first reply, which each turn does once more.
        turn = int(np.isin(request.prompt_ids, self._ends).sum()) // 2 - 1
        self.requests[request.session, turn] += 1
        if turn >= self.held_turn:
            await self.released.wait()
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        ids = self._replies[min(turn, len(self._replies) - 1)]
        spans = (VersionSpan(FIRST, 0, len(ids)),)
        return Generation(ids, np.zeros(len(ids), np.float32), spans, spans, FinishReason.STOP)


@dataclass
class PlayedPool:
    """A pool that plays, its engine, what judges its episodes, and what it needs to be asked."""

    pool: WorkerPool
    engine: DialogueEngine
    scoring: Scoring
    journal: RunJournal
    hosts: dict[str, EnvironmentHost]
    config: RunConfig

    def ticket(self, number: int, attempt: int = 0, task: Task | None = None) -> Ticket:
        """An episode of its own task, which is sampled here unless it is given."""
        [(environment, section)] = self.config.environments.items()
        task = task or task_sampler(section, self.config.seed)(number)
        return Ticket(f"train-{number:06d}-0", task, number, 0, attempt, number, {"main": FIRST}, environment)

    def processes(self) -> list[int]:
        """Process ids of the workers that are not in this process."""
        return [worker.pid for worker in self.pool._workers.values() if isinstance(worker, WorkerProcess)]

    async def play(self, numbers: Sequence[int]) -> list[Episode]:
        """Episodes at once, in the order of their numbers."""
        return await asyncio.gather(*(self.pool.play(self.ticket(number), (), nothing) for number in numbers))

    async def judge(self, episode: Episode) -> Episode:
        """An episode that was played with all that its scorers say, as a run has it."""
        return await self.scoring.add_recorded(await self.scoring.complete(episode))


def make_run(model: Path, folder: Path, **sections: Any) -> RunDirectory:
    """The folder of a run of the counting SQL environment; `sections` replace parts of its configuration."""
    table: dict[str, Any] = {
        "name": "pool",
        "steps": 1,
        "runs_folder": folder,
        "policies": {"main": {"model": model, "chat": {"renderer": "qwen3"}}},
        "environment": {
            "name": "tests.storms.kill_plugins:counting",
            "placement": "inline",
            "options": {"count_file": str(folder / "count.txt"), "linger_s": 0.0},
        },
    }
    for name, section in sections.items():
        table[name] = {**table.get(name, {}), **section}
    return RunDirectory.create(RunConfig.model_validate(table))


@asynccontextmanager
async def playing(
    run: RunDirectory, dialogue: Sequence[Message] = DIALOGUE, delay_s: float = 0.0, places: Places = HERE
) -> AsyncIterator[PlayedPool]:
    """A pool as a run has it, with the run's journal."""
    config = run.config()
    policy = next(iter(config.policies.values()))
    chat = ChatFormat.load(policy.model, policy.chat)
    engine = DialogueEngine(chat, dialogue, delay_s)
    progress = Progress({"main": FIRST})
    journal = RunJournal.open(Claim.take(run.journal), run, config, progress, set(), False)
    hosts = await build_hosts(config, run.logs, plays=num_processes(config) == 0)
    routers = {"main": EngineRouter(Fleet([engine], FIRST))}
    tier = build_tier(config, {}, {}, run.logs, journal.buffer, journal.turn_scores(), places)
    pool = build_pool(config, run.logs, routers, {"main": chat}, hosts, journal, places, tier.played)
    await tier.open()
    judging = asyncio.create_task(tier.run())
    try:
        async with pool.running():
            yield PlayedPool(pool, engine, Scoring(build_scorers(config), journal.buffer, tier), journal, hosts, config)
    finally:
        judging.cancel()
        await asyncio.wait([judging])
        await asyncio.gather(*(host.close() for host in hosts.values()))
        await journal.close()


async def nothing() -> None:
    """No buffer waits for the place."""
