"""Fresh tokens that engine and trainer see differently are not trained, at whatever step they come."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from trainer_reference import (
    PLAIN_SGD,
    Weights,
    assert_moved_by,
    batch_of,
    plain_gradient,
    plain_logprobs,
    plain_network,
)
from transformers import PreTrainedModel

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.trainer.config import OptimizerConfig, TrainerConfig
from agentrl.trainer.minibatches import split_batch
from agentrl.trainer.model import full_weights, load_policy
from agentrl.trainer.optimizer import OptimizerSet
from agentrl.trainer.rank import RankSpec, TrainerRank
from agentrl.trainer.selection import select_sequences
from agentrl.trainer.step import run_step
from agentrl.types.batch import TrainBatch
from agentrl.types.errors import TrainerError
from agentrl.types.explanation import TokenStatus
from agentrl.types.trajectory import NOT_SAMPLED, Trajectory
from agentrl.types.version import PolicyVersion

DR = AlgorithmConfig(advantage="dr_grpo")
SPLIT = DR.model_copy(update={"minibatches": 2, "epochs": 2})
TRAINER = TrainerConfig(optimizer=PLAIN_SGD.model_copy(update={"learning_rate": 0.05}), micro_batch_tokens=30)
ADAM = TRAINER.model_copy(update={"optimizer": OptimizerConfig(learning_rate=1e-3)})
ALGORITHMS = pytest.mark.parametrize("algorithm", [DR, SPLIT], ids=["one", "several"])
PROMPT, REPLY = 4, 6
SWAPPED = (1, 4)


def answered(network: PreTrainedModel, rng: np.random.Generator) -> Trajectory:
    """A prompt and a reply, with the log-probabilities that the network has for it behind this prompt."""
    token_ids = rng.integers(0, network.config.vocab_size, PROMPT + REPLY).astype(np.int32)
    turns = np.asarray([NOT_SAMPLED] * PROMPT + [0] * REPLY, np.int16)
    logprobs = np.zeros(PROMPT + REPLY, np.float32)
    with torch.no_grad():
        logprobs[PROMPT:] = plain_logprobs(network, token_ids, np.arange(PROMPT, PROMPT + REPLY)).numpy()
    return Trajectory("agent", token_ids, turns, (turns >= 0).astype(np.float32), logprobs, (), None)


def honest(network: PreTrainedModel, step: int) -> TrainBatch:
    rng = np.random.default_rng(step)
    groups = [[(float(n % 2 + group), [answered(network, rng)]) for n in range(3)] for group in range(3)]
    return dataclasses.replace(batch_of(groups), version=PolicyVersion(0, step))


def swapped(batch: TrainBatch, pair: tuple[int, ...] = SWAPPED) -> TrainBatch:
    """The batch with the replies of some episodes, and what the engine said of them, behind each other's prompts."""
    episodes = list(batch.episodes)
    for here, there in zip(pair, (*pair[1:], pair[0]), strict=True):
        (own,), (other,) = batch.episodes[here].trajectories, batch.episodes[there].trajectories
        ids = np.concatenate([own.trajectory.token_ids[:PROMPT], other.trajectory.token_ids[PROMPT:]])
        mixed = dataclasses.replace(own.trajectory, token_ids=ids, logprobs=other.trajectory.logprobs)
        episodes[here] = dataclasses.replace(
            batch.episodes[here], trajectories=(dataclasses.replace(own, trajectory=mixed),)
        )
    return dataclasses.replace(batch, episodes=tuple(episodes))


def rank_of(model: Path, folder: Path, algorithm: AlgorithmConfig, trainer: TrainerConfig) -> TrainerRank:
    folder.mkdir(exist_ok=True)
    settings = trainer.model_dump(), algorithm.model_dump()
    rank = TrainerRank(RankSpec("main", str(model), PolicyVersion(0, 0), 0, 1, str(folder / "meet"), 1.0, *settings))
    rank.load()
    return rank


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    if dist.is_initialized():
        dist.destroy_process_group()


def weights_of(rank: TrainerRank, step: int, folder: Path) -> Weights:
    return load_file(Path(rank.stage(PolicyVersion(0, step), str(folder)).path) / "model.safetensors")


def third_step(
    model: Path, folder: Path, algorithm: AlgorithmConfig, max_gap_nats: float, is_foreign: bool
) -> tuple[dict[str, float], Weights, Weights]:
    """Metrics of a run's third step, and the weights before and behind it."""
    rank = rank_of(model, folder, algorithm, TRAINER.model_copy(update={"max_gap_nats": max_gap_nats}))
    newest = model
    for step in range(2):
        assert rank.step(honest(plain_network(newest), step)).metrics["trainer/mismatched_sequences"] == 0
        newest = Path(rank.stage(PolicyVersion(0, step + 1), str(folder / f"v{step + 1}")).path)
    batch = honest(plain_network(newest), 2)
    report = rank.step(swapped(batch) if is_foreign else batch)
    weights = weights_of(rank, 3, folder / "v3")
    dist.destroy_process_group()
    return report.metrics, load_file(newest / "model.safetensors"), weights


def plain_update(model: Path, batch: TrainBatch, left_out: tuple[int, ...]) -> Weights:
    """How one optimizer step at rate .05 moves a plain network by a token mean that counts what it leaves out."""
    network = plain_network(model)
    tokens, loss = sum(REPLY for _ in batch.episodes), torch.zeros(())
    for number, episode in enumerate(batch.episodes):
        advantage = episode.reward - np.mean([e.reward for e in batch.episodes if e.group == episode.group])
        if number not in left_out:
            ids = episode.trajectories[0].trajectory.token_ids
            now = plain_logprobs(network, ids, np.arange(PROMPT, PROMPT + REPLY))
            loss = loss - advantage * now.sum() / tokens
    return plain_gradient(network, loss * 0.05)


@ALGORITHMS
def test_swapped_answers_in_the_middle_of_a_run_are_not_trained(algorithm, tiny_model, store):
    metrics, before, weights = third_step(tiny_model, store / "guarded", algorithm, 1e-3, is_foreign=True)
    assert metrics["trainer/mismatched_sequences"] == 2
    assert metrics["trainer/mismatched_tokens"] == 2 * REPLY
    assert metrics["trainer/fresh_sequences"] == 9
    assert metrics["trainer/fresh_gap_max_nats"] > 0.5
    if algorithm is DR:
        batch = honest(plain_network(store / "guarded" / "v2"), 2)
        update = {name: tensor - before[name] for name, tensor in weights.items()}
        assert_moved_by(update, plain_update(store / "guarded" / "v2", swapped(batch), SWAPPED), atol=1e-6)
    trusting, _, without_protection = third_step(tiny_model, store / "trusting", algorithm, 1e9, is_foreign=True)
    assert trusting["trainer/mismatched_sequences"] == 0
    assert max(float((weights[n] - without_protection[n]).abs().max()) for n in weights) > 1e-4


@pytest.fixture
def group(store) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store / 'group'}", rank=0, world_size=1)


def masked_by_hand(model: Path, batch: TrainBatch, algorithm: AlgorithmConfig, left_out: set[int]) -> Weights:
    """The weights behind a step that never saw some sequences, with the scales of the whole batch."""
    policy = load_policy(model, TRAINER)
    sequences = select_sequences(batch, algorithm)
    kept = [part.without(left_out) for part in split_batch(batch, sequences, algorithm)]
    if len(kept) == 1:
        sequences, kept = list(kept[0].sequences), []
    loose = TRAINER.model_copy(update={"max_gap_nats": 1e9})
    run_step(policy, OptimizerSet(policy, TRAINER.optimizer), sequences, algorithm, loose, 1.0, False, minibatches=kept)
    return {name: tensor.clone() for name, tensor in full_weights(policy).items()}


@pytest.mark.usefixtures("group")
@ALGORITHMS
def test_the_weights_are_those_of_a_batch_without_the_mismatched_sequences(algorithm, tiny_model, network):
    batch = swapped(honest(network, 0))
    sequences = select_sequences(batch, algorithm)
    assert len(sequences) == len(batch.episodes)
    policy = load_policy(tiny_model, TRAINER)
    parts = split_batch(batch, sequences, algorithm)
    metrics = run_step(
        policy, OptimizerSet(policy, TRAINER.optimizer), sequences, algorithm, TRAINER, 1.0, False, minibatches=parts
    )
    assert metrics["trainer/mismatched_sequences"] == 2
    expected = masked_by_hand(tiny_model, batch, algorithm, set(SWAPPED))
    for name, tensor in full_weights(policy).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


class Run:
    """A rank whose batches are answered by the weights that it has made."""

    def __init__(self, model: Path, folder: Path, algorithm: AlgorithmConfig, trainer: TrainerConfig = ADAM) -> None:
        self.rank, self.folder, self.newest = rank_of(model, folder, algorithm, trainer), folder, model
        self.number = 0

    def batch(self) -> TrainBatch:
        return honest(plain_network(self.newest), self.number)

    def step(self, batch: TrainBatch, is_redo: bool = False) -> dict[str, float]:
        metrics = self.rank.step(batch, is_redo).metrics
        self.number += 1
        self.newest = self.folder / f"v{self.number}"
        self.rank.stage(PolicyVersion(0, self.number), str(self.newest))
        return metrics

    def weights(self) -> Weights:
        """Of the rank as it is, whatever became of its last step."""
        return {name: tensor.clone() for name, tensor in full_weights(self.rank._policy).items()}


@ALGORITHMS
def test_too_many_mismatched_sequences_end_the_run_before_a_weight_changes(algorithm, tiny_model, store):
    run = Run(tiny_model, store / "run", algorithm)
    run.step(run.batch())
    half, more = swapped(run.batch(), (0, 1, 3, 4)), swapped(run.batch(), (0, 1, 3, 4, 6))
    before = run.weights()
    message = (
        r"trainer and engine disagree by \d\.\d\de[+-]\d\d nats on tokens of the same weights \(bound "
        r"trainer\.max_gap_nats = 0\.001\), in 5 of 9 sequences: too many .* raise trainer\.max_gap_nats"
    )
    with pytest.raises(TrainerError, match=message):
        run.rank.step(more)
    after = run.weights()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    dist.destroy_process_group()
    other = Run(tiny_model, store / "other", algorithm)
    other.step(other.batch())
    assert other.step(half)["trainer/mismatched_sequences"] == 4


@ALGORITHMS
def test_the_gate_allows_no_mismatched_sequence_and_names_the_count(algorithm, tiny_model, store):
    run = Run(tiny_model, store / "run", algorithm)
    with pytest.raises(TrainerError, match=r"first-step gate: .* in 2 of 9 sequences\. Training on this would be"):
        run.step(swapped(run.batch()))


@ALGORITHMS
def test_a_redo_masks_as_the_first_doing_did_and_the_gate_waits_for_the_next_new_step(algorithm, tiny_model, store):
    run = Run(tiny_model, store / "run", algorithm)
    batches = [run.batch()]
    run.step(batches[0])
    batches.append(swapped(run.batch()))
    metrics = run.step(batches[1])
    checksums = run.rank.stage(PolicyVersion(0, 2), str(store / "first")).checksums
    dist.destroy_process_group()
    again = Run(tiny_model, store / "again", algorithm)
    again.step(batches[0], is_redo=True)
    repeated = again.step(batches[1], is_redo=True)
    assert again.rank.stage(PolicyVersion(0, 2), str(store / "second")).checksums == checksums
    assert {n: v for n, v in repeated.items() if n.startswith("trainer/") and not n.endswith("_per_s")} == {
        n: v for n, v in metrics.items() if n.startswith("trainer/") and not n.endswith("_per_s")
    }
    with pytest.raises(TrainerError, match="first-step gate"):
        again.step(swapped(again.batch()))


@ALGORITHMS
def test_a_redo_ends_at_no_number_of_mismatched_sequences(algorithm, tiny_model, store):
    run = Run(tiny_model, store / "run", algorithm)
    before = run.weights()
    metrics = run.step(swapped(run.batch(), tuple(range(9))), is_redo=True)
    assert metrics["trainer/mismatched_sequences"] == 9
    assert metrics["trainer/optimizer_steps"] == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.weights().items())


@ALGORITHMS
def test_a_batch_of_nothing_but_a_mismatched_sequence_moves_no_weight_not_even_by_momentum(
    algorithm, tiny_model, store
):
    run = Run(tiny_model, store / "run", algorithm)
    run.step(run.batch())
    batch = swapped(run.batch())
    kept = {SWAPPED[0]: batch.episodes[SWAPPED[0]].trajectories}
    episodes = (dataclasses.replace(e, trajectories=kept.get(n, ())) for n, e in enumerate(batch.episodes))
    before = run.weights()
    metrics = run.step(dataclasses.replace(batch, episodes=tuple(episodes)))
    assert (metrics["trainer/mismatched_sequences"], metrics["trainer/fresh_sequences"]) == (1, 1)
    assert metrics["trainer/optimizer_steps"] == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.weights().items())


@ALGORITHMS
def test_tokens_of_older_weights_are_not_compared(algorithm, tiny_model, store):
    run = Run(tiny_model, store / "run", algorithm)
    run.step(run.batch())
    batch = swapped(run.batch())
    episodes = list(batch.episodes)
    for number in SWAPPED:
        (trained,) = episodes[number].trajectories
        older = dataclasses.replace(trained, fresh=np.zeros_like(trained.loss_mask))
        episodes[number] = dataclasses.replace(episodes[number], trajectories=(older,))
    metrics = run.step(dataclasses.replace(batch, episodes=tuple(episodes)))
    assert (metrics["trainer/mismatched_sequences"], metrics["trainer/fresh_sequences"]) == (0, 7)


@ALGORITHMS
def test_mismatched_tokens_have_a_status_of_their_own_and_no_weight(algorithm, tiny_model, store):
    run = Run(tiny_model, store / "run", algorithm)
    explained = run.rank.explain_step(swapped(run.batch()))
    for number, ((terms,), advantage) in enumerate(zip(explained.terms, explained.advantages, strict=True)):
        assert advantage != 0
        assert (set(terms.statuses) == {TokenStatus.MISMATCHED}) == (number in SWAPPED)
        assert (terms.weights == 0).all() == (number in SWAPPED)
    assert explained.report.metrics["trainer/rejected_fraction"] == 0
    assert explained.report.metrics["trainer/computed_tokens"] == 7 * REPLY * algorithm.epochs
