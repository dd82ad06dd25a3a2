"""Experts recorded over real aborts are those that the engine used, and the trainer computes with them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine_server import EngineCalls, Reference

from agentrl.inference.client import EngineClient
from agentrl.rollouts.episode_log import NoLog
from agentrl.rollouts.record import EpisodeRecord
from agentrl.rollouts.session import Session
from agentrl.testing.builders import build_ticket
from agentrl.testing.tiny import tiny_chat
from agentrl.testing.tiny_moe import NUM_LAYERS, TOP_K
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import load_policy
from agentrl.trainer.packing import pack
from agentrl.trainer.sequence import TokenSequence, supervised_sequence
from agentrl.types.episode import Agent
from agentrl.types.generation import Generation, GenerationRequest, Sampling
from agentrl.types.message import Message, Role
from agentrl.types.task import Limits
from agentrl.types.trajectory import Trajectory, build_trajectories

QUESTION = Message(Role.USER, "what is the count?")
LIMITS = Limits(max_turns=1, max_context_tokens=2048, max_reply_tokens=400, tool_s=5.0, total_s=120.0)
MOST_REPLIES = 20
FEWEST_PARTS = 3


class Parts:
    """Counts the tokens of each part of a reply."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.num_tokens: list[int] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        generation = await self._client.generate(request)
        self.num_tokens.append(len(generation.token_ids))
        return generation

    @property
    def num_with_tokens(self) -> int:
        return sum(count > 0 for count in self.num_tokens)


async def drawn_over_aborts(engine: EngineCalls, meanwhile: Callable[[], Awaitable[None]]) -> Trajectory:
    """A reply of several parts with tokens; while the engine is paused between two of them something may happen."""
    client, chat = engine.server.client(), tiny_chat(engine.server.model)
    for number in range(MOST_REPLIES):
        record = EpisodeRecord(build_ticket(f"train-{number:06d}-0", number), (Agent("agent", "main"),))
        parts = Parts(client)
        session = Session(record, "agent", chat, parts, Sampling(routing=(NUM_LAYERS, TOP_K)), LIMITS, NoLog())
        reply = asyncio.create_task(session.generate([QUESTION]))
        while not reply.done() and parts.num_with_tokens < FEWEST_PARTS:
            await _interrupt(engine, reply, parts, meanwhile)
        await reply
        if parts.num_with_tokens >= FEWEST_PARTS:
            await client.close()
            (trajectory,) = build_trajectories(record.close(0.0))
            return trajectory
    raise AssertionError(f"of {MOST_REPLIES} replies none lasted for {FEWEST_PARTS} parts")


async def _interrupt(
    engine: EngineCalls, reply: asyncio.Task, parts: Parts, meanwhile: Callable[[], Awaitable[None]]
) -> None:
    count = len(parts.num_tokens)
    while not reply.done() and (await engine.count())[0] == 0:
        await asyncio.sleep(0)
    await engine.ok("/pause_generation", mode="abort")
    await meanwhile()
    await engine.ok("/continue_generation")
    async with asyncio.timeout(30):
        while not reply.done() and len(parts.num_tokens) == count:
            await asyncio.sleep(0.002)


async def _nothing() -> None:
    return


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one, which the trainer's model needs."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _worst_gap(model: Path, sequence: TokenSequence) -> float:
    """Largest difference in nats between what the engine said and what the trainer computes."""
    batch = pack([sequence], "cpu")
    with torch.no_grad():
        return float((load_policy(model, TrainerConfig())(batch, 1.0) - batch.behaviour_S).abs().max())


async def test_a_reply_of_several_parts_is_trained_with_the_experts_that_drew_it(
    moe_engine: EngineCalls, reference: Reference, alone: None
) -> None:
    model = moe_engine.server.model
    trajectory = await drawn_over_aborts(moe_engine, _nothing)
    rows = trajectory.routed_experts
    assert np.array_equal(rows[:-1], reference.experts(model, trajectory.token_ids.tolist())[:-1])
    sequence = replace(supervised_sequence(trajectory), routed_experts=rows)
    assert _worst_gap(model, sequence) < 1e-3
    shifted = np.concatenate([rows[1:-1], rows[:1], rows[-1:]])
    assert _worst_gap(model, replace(sequence, routed_experts=shifted)) > 0.01


async def test_each_part_has_the_experts_of_the_weights_that_drew_it(
    moe_engine: EngineCalls, reference: Reference
) -> None:
    models = {0: moe_engine.server.model}

    async def swap() -> None:
        step = len(models)
        models[step] = moe_engine.server.other_model if step % 2 else moe_engine.server.model
        await moe_engine.load(models[step], f"0.{step}")

    trajectory = await drawn_over_aborts(moe_engine, swap)
    ids = trajectory.token_ids.tolist()
    assert len(trajectory.versions) >= FEWEST_PARTS
    for span in trajectory.versions:
        own = reference.experts(models[span.version.step], ids)[span.start - 1 : span.end - 1]
        assert np.array_equal(trajectory.routed_experts[span.start - 1 : span.end - 1], own)
    others = reference.experts(models[trajectory.versions[-1].version.step], ids)
    assert not np.array_equal(trajectory.routed_experts[:-1], others[:-1])
