"""verifiers' own TrainClient plays on a real engine while its weights change."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from engine_server import EngineCalls, Reference

from agentrl.inference.client import EngineClient
from agentrl.testing.tiny import tiny_chat
from agentrl.types.trajectory import Trajectory, build_trajectories
from agentrl.types.version import FIRST_VERSION, PolicyVersion, VersionSpan
from agentrl.types.weights import FolderWeights
from tests.adapters.verifiers_player import Recorded, Rollout, play_rollouts, verifiers_player

pytestmark = pytest.mark.adapters
NUM_ROLLOUTS = 2
REPLY_TOKENS = 80
TOKENS_BETWEEN_PUBLICATIONS = 40


async def test_verifiers_trains_on_an_engine_whose_weights_change_meanwhile(
    engine: EngineCalls, reference: Reference, tmp_path: Path
) -> None:
    chat = tiny_chat(engine.server.model)
    client = engine.server.client(control_s=60.0)
    engines = [Recorded(client) for _ in range(NUM_ROLLOUTS)]
    async with verifiers_player(engine.server.model, tmp_path / "log") as player:
        playing = asyncio.create_task(play_rollouts(player, chat, engines, max_reply_tokens=REPLY_TOKENS))
        models = await publish_meanwhile(playing, client, engine, engines)
        rollouts = await playing
    await client.close()
    for rollout in rollouts:
        rollout.check()
        (trajectory,) = build_trajectories(rollout.episode)
        check_versions(trajectory, models, reference)
    assert sum(count_aborts(rollout) for rollout in rollouts) > 0
    assert len({span.version for rollout in rollouts for span in versions_of(rollout)}) > 1


async def publish_meanwhile(
    playing: asyncio.Task[list[Rollout]], client: EngineClient, engine: EngineCalls, engines: Sequence[Recorded]
) -> dict[PolicyVersion, Path]:
    """Publish two sets of weights in turn, while replies are made; gives what every version was.

    However slow the engine is, between two publications tokens are drawn.
    """
    version, drawn = FIRST_VERSION, 0
    models = {version: engine.server.model}
    while not playing.done():
        now_drawn = sum(recorded.num_tokens for recorded in engines)
        if now_drawn < drawn + TOKENS_BETWEEN_PUBLICATIONS or not await client.count_requests():
            await asyncio.sleep(0.01)
            continue
        version, drawn = version.next(), now_drawn
        models[version] = engine.server.model if len(models) % 2 == 0 else engine.server.other_model
        await client.pause()
        await client.swap(FolderWeights(str(models[version])), version)
        await client.resume()
    return models


def check_versions(trajectory: Trajectory, models: dict[PolicyVersion, Path], reference: Reference) -> None:
    """Each token has the probability that the weights of its version give it, and no others."""
    ids = trajectory.token_ids.tolist()
    by_model = {model: np.asarray([0.0, *reference.logprobs(model, ids)]) for model in set(models.values())}
    for span in trajectory.versions:
        expected = by_model[models[span.version]][span.start : span.end]
        assert trajectory.logprobs[span.start : span.end] == pytest.approx(expected, abs=1e-3)


def versions_of(rollout: Rollout) -> list[VersionSpan]:
    return [span for node in rollout.episode.nodes if node.sample is not None for span in node.sample.versions]


def count_aborts(rollout: Rollout) -> int:
    return sum(turn.aborts for turn in rollout.episode.turns)
