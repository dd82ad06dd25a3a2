"""Episodes a second with a staleness bound of 4, against the same code with bound 0.

The engine follows a script whose replies have long-tailed latencies (95th percentile ten times the median),
proportional to their lengths; the trainer takes a fixed time; both are interrupted and published to like
real ones. Controller, buffer, publisher, router, sessions, runner and the SQL environment are the real ones.
All of it runs on a virtual clock, so no figure depends on the machine. 32 episodes a step, 32 places.

Figures per policy: `rate_ratio` of episodes a second to bound 0; `slot_utilisation`, the mean share of places
with a generation in flight; `length_ratio`, mean length of the trained over that of all dispatched episodes,
in tokens of the script, but for those of the last steps; `masked_token_fraction` of the tokens that were taken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from agentrl.buffer.frontier import FrontierState
from agentrl.buffer.ledger import Ledger
from agentrl.buffer.memory import MemoryBuffer
from agentrl.inference.fleet import Fleet
from agentrl.inference.router import EngineRouter
from agentrl.orchestration.assembly import PolicyParts, RunParts, StartPoint
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.controller import Controller
from agentrl.orchestration.ending import RunSummary
from agentrl.orchestration.players import build_environments, build_runner, task_sampler
from agentrl.orchestration.recorder import Recorder, SilentObserver
from agentrl.orchestration.run_directory import RunDirectory
from agentrl.orchestration.serving import Serving
from agentrl.testing.clock import run_virtual
from agentrl.testing.tiny import make_tiny_model, tiny_chat
from agentrl.tokens.chat import ChatFormat
from agentrl.types.batch import Receipt, StepReport, TrainBatch, WeightsManifest
from agentrl.types.generation import FinishReason, Generation, GenerationRequest
from agentrl.types.message import Message, Role
from agentrl.types.task import Split, Task
from agentrl.types.version import PolicyVersion, VersionSpan
from agentrl.weights.config import PublishConfig
from agentrl.weights.disk import DiskTransport
from agentrl.weights.publisher import StagedPublisher
from agentrl_environments.sql.experts import act_clean
from agentrl_environments.sql.tasks import SqlOptions
from tests.benchmarks.report import report

FIRST = PolicyVersion(0, 0)
PLACES = 32
MEDIAN_FILLER_TOKENS = 32
TAIL = math.log(10) / 1.6449  # of a lognormal whose 95th percentile is ten times its median
SECONDS_PER_TOKEN = 1 / 40
TRAIN_STEP_S = 6.0
SWAP_S = 0.1
LAST_STEPS = 20


@dataclass(slots=True)
class TailEngine:
    """Replies word by word at a fixed speed; lengths are drawn by session and turn, whatever interrupts."""

    chat: ChatFormat
    sample_task: Callable[[int], Task]
    name: str = "tail"
    version: PolicyVersion = FIRST
    busy_s: float = 0.0
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
        part = await self._until_paused(rest)
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

    async def update_weights_from_disk(self, path: str, version: PolicyVersion) -> None:
        await asyncio.sleep(SWAP_S)
        self.version = version

    async def receipt(self) -> Receipt:
        return Receipt(self.name, self.version, {}, 0.0, 0)

    async def update(self, path: str, body: dict[str, str]) -> None:
        return

    async def _until_paused(self, rest: np.ndarray) -> np.ndarray:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(len(rest) * SECONDS_PER_TOKEN):
                await self._pause.wait()
        except TimeoutError:
            return rest
        return rest[: min(int((loop.time() - started) / SECONDS_PER_TOKEN), len(rest) - 1)]

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
        task = self.sample_task(int(session.split("/")[1].split("-")[1]))
        message = act_clean(SqlOptions(), task, conversation, random.Random(0))
        turn = sum(m.role is Role.ASSISTANT for m in conversation)
        filler = " ".join(["what"] * filler_words(session, turn))
        return Message(Role.ASSISTANT, f"{filler} {message.content}", message.tool_calls)


def filler_words(session: str, turn: int) -> int:
    draw = random.Random(f"{session}/{turn}").gauss(0.0, TAIL)
    return max(1, round(MEDIAN_FILLER_TOKENS / 2 * math.exp(draw)))


def intended_length(seed: int, episode_id: str) -> int:
    """Filler of the three turns of an episode, whether or not it got that far."""
    return sum(filler_words(f"{seed}/{episode_id}/agent", turn) for turn in range(3))


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
class Result:
    """One simulated run."""

    episodes_per_s: float
    slot_utilisation: float
    length_ratio: float
    masked_token_fraction: float


def run_config(model: Path, folder: Path, policy: str, max_staleness: int, steps: int, seed: int) -> RunConfig:
    buffer = {"group_size": 4, "groups_per_step": 8, "max_staleness": max_staleness, "staleness": policy}
    return RunConfig.model_validate(
        {
            "name": f"{policy}-{max_staleness}",
            "seed": seed,
            "steps": steps,
            "runs_folder": folder,
            "policies": {"main": {"model": model, "chat": {"renderer": "qwen3"}}},
            "environment": {"name": "sql"},
            "rollout": {
                "concurrency": PLACES,
                "limits": {"max_context_tokens": 1 << 20, "max_reply_tokens": 1 << 20, "total_s": 1e6},
            },
            "buffer": {**buffer, "stall_s": 1e6},
            "evaluation": {"interval_steps": 0, "final_tasks": 0},
            "checkpoint": {"interval_steps": 1_000_000},
        }
    )


async def simulate(config: RunConfig, chat: ChatFormat) -> Result:
    """A whole run by the real controller over the scripted engine and trainer."""
    run = RunDirectory.create(config)
    recorder = Recorder(run, config.name, SilentObserver())
    sample_task = task_sampler(config, Split.TRAIN)
    engine = TailEngine(chat, sample_task)
    fleet = Fleet([engine], FIRST)
    router = EngineRouter(fleet)
    publisher = StagedPublisher(fleet, DiskTransport(), PublishConfig(), WeightsManifest("main", FIRST, "", {}, 0))
    buffer = MemoryBuffer(
        config.buffer, PLACES, 1, 10, sample_task, config.seed, {"main": FIRST},
        FrontierState(), Ledger(recorder.write_ledger_line),
    )  # fmt: skip
    environments = build_environments(config, run.logs)
    parts = RunParts(
        config=config,
        run=run,
        start=StartPoint(FIRST),
        runtime=Machine(),
        policies={"main": PolicyParts(TimedTrainer(), Serving(fleet, router, publisher, ()))},
        buffer=buffer,
        runner=build_runner(config, router, chat, environments, buffer),
        evaluator=None,
        recorder=recorder,
        observer=SilentObserver(),
    )
    started = asyncio.get_running_loop().time()
    summary = await Controller(parts).run()
    seconds = asyncio.get_running_loop().time() - started
    recorder.close()
    return summarise(run, config, summary, engine, seconds)


def summarise(run: RunDirectory, config: RunConfig, summary: RunSummary, engine: TailEngine, seconds: float) -> Result:
    lines = [json.loads(line) for line in (run.path / "ledger.jsonl").read_text().splitlines()]
    seeds = {}
    for session, _turn in engine._replies:
        seed, episode_id, _agent = session.split("/")
        seeds[episode_id] = seed
    last_group = max(int(line["task"].split("/")[-1]) for line in lines)
    groups_left_out = LAST_STEPS * config.buffer.groups_per_step
    counted = [line for line in lines if int(line["task"].split("/")[-1]) <= last_group - groups_left_out]
    lengths = {line["episode_id"]: intended_length(seeds[line["episode_id"]], line["episode_id"]) for line in counted}
    trained = [lengths[line["episode_id"]] for line in counted if line["trained_tokens"] > 0]
    num_trained = sum(line["outcome"] == "trained" for line in lines)
    taken = sum(line["trained_tokens"] + line["masked_tokens"] for line in lines)
    return Result(
        episodes_per_s=num_trained / seconds,
        slot_utilisation=engine.busy_s / (PLACES * seconds),
        length_ratio=statistics.mean(trained) / statistics.mean(lengths.values()),
        masked_token_fraction=sum(line["masked_tokens"] for line in lines) / taken,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150)
    arguments = parser.parse_args()
    policies = []
    with tempfile.TemporaryDirectory() as name:
        model = make_tiny_model(Path(name) / "model")
        chat = tiny_chat(model)

        def measure(policy: str, max_staleness: int, steps: int) -> Result:
            config = run_config(model, Path(name), policy, max_staleness, steps, arguments.seed)
            return run_virtual(simulate(config, chat))

        in_turn = measure("mask_spans", 0, max(arguments.steps // 3, LAST_STEPS + 20))
        for policy in ("mask_spans", "wait", "withhold"):
            result = measure(policy, 4, arguments.steps)
            policies.append(
                {
                    "policy": policy,
                    "S": 4,
                    "rate_ratio": round(result.episodes_per_s / in_turn.episodes_per_s, 3),
                    "slot_utilisation": round(result.slot_utilisation, 3),
                    "length_ratio": round(result.length_ratio, 4),
                    "masked_token_fraction": round(result.masked_token_fraction, 4),
                }
            )
    report(
        "async_vs_sync",
        policies=policies,
        in_turn_slot_utilisation=round(in_turn.slot_utilisation, 3),
        episodes_per_step=32,
        places=PLACES,
        steps=arguments.steps,
        train_step_s=TRAIN_STEP_S,
        seed=arguments.seed,
    )


if __name__ == "__main__":
    main()
