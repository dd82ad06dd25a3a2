"""Batches of a tiny model, and what plain transformers says about them."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3ForCausalLM

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.trainer.config import OptimizerConfig, TrainerConfig
from agentrl.trainer.model import full_weights, load_policy
from agentrl.trainer.optimizer import OptimizerSet
from agentrl.trainer.selection import select_sequences
from agentrl.trainer.step import run_step
from agentrl.types.batch import TrainBatch, TrainEpisode, TrainTrajectory
from agentrl.types.generation import KeptTokens
from agentrl.types.trajectory import NOT_SAMPLED, Trajectory
from agentrl.types.version import PolicyVersion

Weights = dict[str, torch.Tensor]
# With these a step moves the weights by exactly the negative gradient.
PLAIN_SGD = OptimizerConfig(kind="sgd", learning_rate=1.0, momentum=0.0, max_grad_norm=1e9)
PLAIN = TrainerConfig(optimizer=PLAIN_SGD)
REWARDS = ((1.0, 0.0, 0.0), (0.5, 2.0), (1.0, 1.0))


def make_odd_model(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    config = AutoConfig.from_pretrained(source)
    config.tie_word_embeddings = False
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 8
    torch.manual_seed(1)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def plain_network(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")


def plain_logprobs(
    network: PreTrainedModel,
    token_ids: np.ndarray,
    selected: np.ndarray,
    temperature: float = 1.0,
    kept: list[list[int]] | None = None,
) -> torch.Tensor:
    """Log-probabilities of the selected tokens, one sequence alone, one token at a time."""
    logits = network(torch.from_numpy(token_ids.astype(np.int64))[None]).logits[0] / temperature
    out = []
    for number, position in enumerate(selected.tolist()):
        row = logits[position - 1]
        allowed = row if kept is None else row[kept[number]]
        out.append(row[int(token_ids[position])] - allowed.logsumexp(0))
    return torch.stack(out)


def make_trajectory(
    network: PreTrainedModel,
    rng: np.random.Generator,
    noise: float = 0.0,
    temperature: float = 1.0,
    kept_size: int | None = None,
    prompt: Sequence[int] = (),
) -> Trajectory:
    """Prompt, one to three replies of one to five tokens, a context token behind each; sampled by the network.

    Behind what is given of the prompt come two to five tokens more.
    """
    turns = [NOT_SAMPLED] * (len(prompt) + int(rng.integers(2, 6)))
    for turn in range(int(rng.integers(1, 4))):
        turns += [turn] * int(rng.integers(1, 6)) + [NOT_SAMPLED]
    turns_L = np.asarray(turns, np.int16)
    selected = np.flatnonzero(turns_L != NOT_SAMPLED)
    vocabulary = network.config.vocab_size
    token_ids = rng.integers(0, vocabulary, len(turns_L)).astype(np.int32)
    token_ids[: len(prompt)] = prompt
    sets = None
    if kept_size is not None:
        sets = [sorted({int(token_ids[i]), *rng.integers(0, vocabulary, kept_size).tolist()}) for i in selected]
    logprobs = np.zeros(len(turns_L), np.float32)
    with torch.no_grad():
        logprobs[selected] = plain_logprobs(network, token_ids, selected, temperature, sets).numpy()
    logprobs[selected] += noise * rng.standard_normal(len(selected)).astype(np.float32)
    kept = None if sets is None else KeptTokens.from_lists(sets)
    return Trajectory("agent", token_ids, turns_L, (turns_L >= 0).astype(np.float32), logprobs, (), kept)


def batch_of(groups: Sequence[Sequence[tuple[float, Sequence[Trajectory]]]], staleness: int = 0) -> TrainBatch:
    """Groups of episodes of a reward and branches; every sampled token is trained."""
    episodes = []
    for group, members in enumerate(groups):
        for reward, branches in members:
            trained = tuple(TrainTrajectory(t, t.sampled, np.where(t.sampled, staleness, 0)) for t in branches)
            episodes.append(TrainEpisode(f"e{len(episodes)}", group, reward, trained))
    return TrainBatch("main", PolicyVersion(0, 0), tuple(episodes))


def make_batch(
    network: PreTrainedModel,
    seed: int = 0,
    rewards: Sequence[Sequence[float]] = REWARDS,
    staleness: int | None = None,
    **options: Any,
) -> TrainBatch:
    """All episodes begin with the same tokens, and those of a group with the same prompt.

    With noise, as if another policy had sampled, tokens are a step old unless it is said otherwise.
    """
    rng = np.random.default_rng(seed)
    groups = []
    for group in rewards:
        prompt = [7, 1, 4, *rng.integers(0, network.config.vocab_size, 4).tolist()]
        groups.append([(reward, [make_trajectory(network, rng, prompt=prompt, **options)]) for reward in group])
    return batch_of(groups, int("noise" in options) if staleness is None else staleness)


def mask_tokens(batch: TrainBatch, share: float) -> TrainBatch:
    """The batch with some sampled tokens out of the loss, as stale ones are."""
    rng = np.random.default_rng(9)
    episodes = []
    for episode in batch.episodes:
        trained = tuple(
            dataclasses.replace(t, loss_mask=t.loss_mask & (rng.random(len(t.loss_mask)) > share))
            for t in episode.trajectories
        )
        episodes.append(dataclasses.replace(episode, trajectories=trained))
    return dataclasses.replace(batch, episodes=tuple(episodes))


def take_step(
    model: Path,
    batch: TrainBatch,
    algorithm: AlgorithmConfig,
    config: TrainerConfig = PLAIN,
    temperature: float = 1.0,
    is_gate: bool = False,
) -> tuple[dict[str, float], Weights]:
    """Metrics of one step of a fresh policy, and by how much it moved the weights."""
    policy = load_policy(model, config)
    before = {name: tensor.clone() for name, tensor in full_weights(policy).items()}
    sequences = select_sequences(batch, algorithm)
    optimizer = OptimizerSet(policy, config.optimizer)
    metrics = run_step(policy, optimizer, sequences, algorithm, config, temperature, is_gate)
    return metrics, {name: tensor - before[name] for name, tensor in full_weights(policy).items()}


def plain_gradient(network: PreTrainedModel, loss: torch.Tensor) -> Weights:
    names, parameters = zip(*network.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def assert_moved_by(update: Weights, gradient: Weights, rtol: float = 1e-4, atol: float = 2e-7) -> None:
    """The update is the negative gradient of every weight."""
    assert update.keys() == gradient.keys()
    assert max(float(g.abs().max()) for g in gradient.values()) > 1e-4, "a gradient of nothing proves nothing"
    for name, tensor in gradient.items():
        torch.testing.assert_close(update[name], -tensor, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
