"""The step of the trainer against plain transformers and plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from trainer_reference import (
    PLAIN,
    Weights,
    assert_moved_by,
    batch_of,
    make_batch,
    make_trajectory,
    mask_tokens,
    plain_gradient,
    plain_logprobs,
    plain_network,
    take_step,
)
from transformers import PreTrainedModel

from agentrl.algorithms.config import (
    AlgorithmConfig,
    CispoConfig,
    DppoConfig,
    IcePopConfig,
    NoCorrectionConfig,
    PpoConfig,
    TisConfig,
)
from agentrl.testing.builders import build_episode, build_ticket
from agentrl.trainer.model import load_policy
from agentrl.trainer.packing import pack
from agentrl.trainer.selection import select_sequences
from agentrl.types.batch import TrainBatch
from agentrl.types.episode import Episode, Node, SampledColumns
from agentrl.types.trajectory import build_trajectories
from agentrl.types.version import PolicyVersion, VersionSpan

pytestmark = pytest.mark.usefixtures("process_group")

TOKEN_TIS = AlgorithmConfig(advantage="dr_grpo")
TURN_TIS = AlgorithmConfig(advantage="grpo", correction=TisConfig(level="turn"), aggregation="episode")
CISPO = AlgorithmConfig(loss=CispoConfig(), advantage="leave_one_out", aggregation="constant", constant_tokens=7)
DPPO = AlgorithmConfig(loss=DppoConfig(), correction=NoCorrectionConfig())
ALGORITHMS = {"token_tis": TOKEN_TIS, "turn_tis": TURN_TIS, "cispo": CISPO, "dppo": DPPO}


def plain_advantages(batch: TrainBatch, kind: str) -> list[float]:
    out = []
    for episode in batch.episodes:
        mine = [e.reward for e in batch.episodes if e.group == episode.group]
        mean = sum(mine) / len(mine)
        std = math.sqrt(sum((r - mean) ** 2 for r in mine) / (len(mine) - 1))
        centred = episode.reward - mean
        scaled = {"dr_grpo": centred, "grpo": centred / (std + 1e-4)}
        out.append({**scaled, "leave_one_out": centred * len(mine) / (len(mine) - 1)}[kind])
    return out


def plain_loss(network: PreTrainedModel, batch: TrainBatch, algorithm: AlgorithmConfig) -> torch.Tensor:
    """The loss of linear episodes, written token by token."""
    total = torch.zeros(())
    counts = [sum(int(t.loss_mask.sum()) for t in e.trajectories) for e in batch.episodes]
    for episode, advantage, count in zip(
        batch.episodes, plain_advantages(batch, algorithm.advantage), counts, strict=True
    ):
        denominator = {
            "token": sum(counts),
            "episode": len(counts) * count,
            "constant": len(counts) * algorithm.constant_tokens,
        }[algorithm.aggregation]
        for trained in episode.trajectories:
            trajectory, selected = trained.trajectory, np.flatnonzero(trained.loss_mask)
            logprobs = plain_logprobs(network, trajectory.token_ids, selected)
            distances = [n.item() - float(trajectory.logprobs[p]) for n, p in zip(logprobs, selected, strict=True)]
            for number, position in enumerate(selected):
                now, mu = logprobs[number], float(trajectory.logprobs[position])
                if algorithm.loss.kind == "ppo":
                    turn = trajectory.turns[position]
                    is_turn = algorithm.correction.level == "turn"
                    same = [d for d, p in zip(distances, selected, strict=True) if trajectory.turns[p] == turn]
                    weight = min(math.exp(sum(same) if is_turn else distances[number]), 2.0)
                    loss = -advantage * weight * torch.exp(now - now.detach())
                elif algorithm.loss.kind == "cispo":
                    loss = -advantage * min(math.exp(distances[number]), 5.0) * now
                else:
                    moved = math.exp(now.item()) - math.exp(mu)
                    is_out = moved > 0.2 if advantage > 0 else (advantage < 0 and moved < -0.2)
                    loss = (0.0 if is_out else -advantage * torch.exp(now - mu)) + 1e-3 * (now - mu) ** 2
                total = total + loss / denominator
    return total


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_moves_the_weights_by_the_gradient_of_a_plain_loop(name, tiny_model, network):
    batch = mask_tokens(make_batch(network, noise=0.5), 0.2)
    loss = plain_loss(network, batch, ALGORITHMS[name])
    metrics, update = take_step(tiny_model, batch, ALGORITHMS[name])
    assert metrics["trainer/loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    gradient = plain_gradient(network, loss)
    assert_moved_by(update, gradient)
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
    assert metrics["trainer/grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.fixture(scope="module")
def unsplit(tiny_model, network) -> Weights:
    """The update when everything fits into one micro-batch."""
    return take_step(tiny_model, make_batch(network, noise=0.5), TURN_TIS)[1]


@pytest.mark.parametrize(("micro_batch", "chunk"), [(1, 1024), (20, 1024), (33, 5), (8192, 1)])
def test_neither_micro_batches_nor_chunks_change_the_update(micro_batch, chunk, tiny_model, network, unsplit):
    config = PLAIN.model_copy(update={"micro_batch_tokens": micro_batch, "logprob_chunk_tokens": chunk})
    _, update = take_step(tiny_model, make_batch(network, noise=0.5), TURN_TIS, config)
    assert_moved_by(update, {name: -tensor for name, tensor in unsplit.items()})


@pytest.mark.parametrize("kind", ["tiny", "odd"])
@pytest.mark.parametrize("kept_size", [None, 4])
def test_packed_log_probabilities_equal_each_sequence_alone(kind, kept_size, tiny_model, odd_model):
    model = tiny_model if kind == "tiny" else odd_model
    alone = plain_network(model)
    batch = make_batch(alone, temperature=0.7, kept_size=kept_size)
    row = pack(select_sequences(batch, DPPO), "cpu")
    assert row.num_tokens > 40
    with torch.no_grad():
        packed = load_policy(model, PLAIN)(row, 0.7)
    # The behaviour log-probabilities of the batch are plain transformers' own, one sequence at a time.
    torch.testing.assert_close(packed, row.behaviour_S, rtol=1e-5, atol=2e-6)


def test_skipping_episodes_without_advantage_changes_no_gradient(tiny_model, network, monkeypatch):
    batch = make_batch(network, noise=0.5)
    skipped, update = take_step(tiny_model, batch, TOKEN_TIS)
    monkeypatch.setattr("agentrl.trainer.selection.vanishes_without_advantage", lambda config: False)
    whole, unskipped = take_step(tiny_model, batch, TOKEN_TIS)
    assert whole["trainer/computed_tokens"] > skipped["trainer/computed_tokens"]
    assert_moved_by(update, {name: -tensor for name, tensor in unskipped.items()})


def branched_episode(network: PreTrainedModel, rng: np.random.Generator, name: str) -> Episode:
    """A shared reply with two branches below it, one of which forks again."""
    nodes: list[Node] = []

    def add(parent: int | None, turn: int, count: int, is_sampled: bool) -> int:
        ids = rng.integers(0, network.config.vocab_size, count).astype(np.int32)
        spans = (VersionSpan(PolicyVersion(0, 0), 0, count),)
        sample = SampledColumns(np.full(count, -6.0, np.float32), spans, spans) if is_sampled else None
        nodes.append(Node(len(nodes), parent, "agent", turn, ids, sample))
        return len(nodes) - 1

    shared = add(add(None, 0, 3, False), 0, 4, True)
    add(add(shared, 1, 2, False), 1, 3, True)
    fork = add(shared, 1, 2, True)
    add(fork, 2, 1, True)
    add(add(fork, 2, 1, False), 2, 2, True)
    episode = build_episode(build_ticket(name), [(1, 0)])
    return Episode(episode.ticket, episode.agents, tuple(nodes), ())


def node_loss(network: PreTrainedModel, episode: Episode, advantage: float) -> torch.Tensor:
    """Sum over nodes: each sampled node once, on the path from the root."""
    total = torch.zeros(())
    for node in episode.nodes:
        if node.sample is None:
            continue
        path = [node]
        while path[0].parent is not None:
            path.insert(0, episode.nodes[path[0].parent])
        token_ids = np.concatenate([n.token_ids for n in path])
        selected = np.arange(len(token_ids) - len(node.token_ids), len(token_ids))
        now = plain_logprobs(network, token_ids, selected)
        weights = (now.detach() - torch.from_numpy(node.sample.logprobs)).exp().clamp(max=2.0)
        total = total - (advantage * weights * torch.exp(now - now.detach())).sum()
    return total


@pytest.mark.parametrize("aggregation", ["token", "episode"])
def test_branches_give_the_loss_and_gradient_of_their_nodes(aggregation, tiny_model, network):
    rng = np.random.default_rng(3)
    branched = branched_episode(network, rng, "e0")
    linear = make_trajectory(network, rng, noise=0.5)
    batch = batch_of([[(1.0, build_trajectories(branched)), (0.0, [linear])]], staleness=1)
    algorithm = TOKEN_TIS.model_copy(update={"aggregation": aggregation})
    selected = np.flatnonzero(linear.sampled)
    now = plain_logprobs(network, linear.token_ids, selected)
    weights = (now.detach() - torch.from_numpy(linear.logprobs[selected])).exp().clamp(max=2.0)
    parts = [node_loss(network, branched, 0.5), (0.5 * weights * torch.exp(now - now.detach())).sum()]
    counts = [branched.num_sampled_tokens, len(selected)]
    assert counts[0] == 12
    loss = sum(parts) / sum(counts) if aggregation == "token" else parts[0] / counts[0] / 2 + parts[1] / counts[1] / 2
    metrics, update = take_step(tiny_model, batch, algorithm)
    assert metrics["trainer/loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert_moved_by(update, plain_gradient(network, loss))


def test_rejected_tokens_leave_the_gradient_but_not_the_denominator(tiny_model, network):
    batch = make_batch(network, noise=1.5)
    icepop = AlgorithmConfig(advantage="dr_grpo", loss=PpoConfig(), correction=IcePopConfig(low=0.8, high=1.25))
    total, rejected, computed, loss = 0, 0, 0, torch.zeros(())
    for episode, advantage in zip(batch.episodes, plain_advantages(batch, "dr_grpo"), strict=True):
        (trajectory,) = (t.trajectory for t in episode.trajectories)
        selected = np.flatnonzero(trajectory.sampled)
        total += len(selected)
        if advantage == 0:
            continue
        for now, position in zip(plain_logprobs(network, trajectory.token_ids, selected), selected, strict=True):
            weight = math.exp(now.item() - float(trajectory.logprobs[position]))
            computed += 1
            if 0.8 <= weight <= 1.25:
                loss = loss - advantage * weight * torch.exp(now - now.detach())
            else:
                rejected += 1
    assert 0 < rejected < computed < total
    metrics, update = take_step(tiny_model, batch, icepop)
    assert metrics["trainer/rejected_fraction"] == pytest.approx(rejected / computed)
    assert_moved_by(update, plain_gradient(network, loss / total))
