"""What a rank says of each token, beside what plain transformers says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from trainer_reference import make_batch, mask_tokens, plain_logprobs
from transformers import PreTrainedModel

from agentrl.algorithms.config import AlgorithmConfig, IcePopConfig, PpoConfig
from agentrl.trainer.config import OptimizerConfig, TrainerConfig
from agentrl.trainer.rank import RankSpec, TrainerRank
from agentrl.types.batch import TrainBatch
from agentrl.types.explanation import TokenStatus
from agentrl.types.version import PolicyVersion

# Small micro-batches, so that sequences are computed in another order than that of the batch.
TRAINER = TrainerConfig(
    optimizer=OptimizerConfig(kind="sgd", learning_rate=0.01), max_gap_nats=1e9, micro_batch_tokens=24
)
CLIPPING = AlgorithmConfig(loss=PpoConfig(proximal="behaviour"), correction=IcePopConfig(low=0.4, high=2.5))


def spec_of(model: Path, folder: Path, num_ranks: int = 1) -> RankSpec:
    return RankSpec(
        policy="main",
        model=str(model),
        version=PolicyVersion(0, 0),
        rank=0,
        num_ranks=num_ranks,
        rendezvous=str(folder / "rendezvous"),
        temperature=1.0,
        trainer=TRAINER.model_dump(),
        algorithm=CLIPPING.model_dump(),
    )


@pytest.fixture
def rank(tiny_model: Path, tmp_path: Path) -> Iterator[TrainerRank]:
    rank = TrainerRank(spec_of(tiny_model, tmp_path))
    rank.load()
    yield rank
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def batch(network: PreTrainedModel) -> TrainBatch:
    """Two groups that differ and one that does not, with noise enough to clip and reject, and some stale tokens."""
    return mask_tokens(make_batch(network, noise=0.6), share=0.2)


def test_each_token_has_the_log_probability_of_the_weights_before_the_step(rank, network, batch):
    explained = rank.explain_step(batch)
    compared = 0
    for episode, terms in zip(batch.episodes, explained.terms, strict=True):
        (trained,), (of_it,) = episode.trajectories, terms
        if of_it is None:
            continue
        selected = np.flatnonzero(trained.loss_mask)
        with torch.no_grad():
            expected = plain_logprobs(network, trained.trajectory.token_ids, selected).numpy()
        assert of_it.logprobs == pytest.approx(expected, abs=1e-5)
        assert of_it.ratios == pytest.approx(np.exp(expected - trained.trajectory.logprobs[selected]), rel=1e-4)
        assert (of_it.proximal_ratios == 1).all(), "the weights before the step are those before its only update"
        compared += len(selected)
    assert compared == explained.report.metrics["trainer/computed_tokens"] > 10


def test_statuses_add_up_to_what_the_step_reports(rank, batch):
    explained = rank.explain_step(batch)
    statuses = [status for episode in explained.terms for terms in episode if terms for status in terms.statuses]
    rejected = statuses.count(TokenStatus.REJECTED) / len(statuses)
    assert explained.report.metrics["trainer/rejected_fraction"] == pytest.approx(rejected)
    assert 0 < rejected < 1
    assert {TokenStatus.CLIPPED_LOW, TokenStatus.CLIPPED_HIGH, TokenStatus.KEPT} <= set(statuses)


def test_episodes_without_advantage_are_explained_by_nothing(rank, batch):
    explained = rank.explain_step(batch)
    assert explained.advantages[0][""] == pytest.approx((2 / 3) / (math.sqrt(1 / 3) + 1e-4))
    assert explained.advantages[-2:] == ({"": 0.0}, {"": 0.0})
    assert [terms for episode in explained.terms[-2:] for terms in episode] == [None, None]
    assert None not in [terms for episode in explained.terms[:-2] for terms in episode]


def test_the_explained_step_is_the_step(rank, batch, tiny_model, tmp_path):
    explained = rank.explain_step(batch)
    weights = rank.stage(PolicyVersion(0, 1), str(tmp_path / "explained")).checksums
    dist.destroy_process_group()
    other = TrainerRank(spec_of(tiny_model, tmp_path / "other"))
    (tmp_path / "other").mkdir()
    other.load()
    report = other.step(batch)
    metrics = {name: value for name, value in report.metrics.items() if not name.endswith("_s")}
    assert {name: explained.report.metrics[name] for name in metrics} == metrics
    assert other.stage(PolicyVersion(0, 1), str(tmp_path / "plain")).checksums == weights


def test_each_token_has_the_advantage_that_its_rule_of_credit_gives_it(tiny_model, tmp_path, batch):
    """The n-th turn of one episode has the potential n: what its outcome has less n."""
    credit = AlgorithmConfig(advantage="leave_one_out", credit={"kind": "shaping", "scorer": "prm"})
    rank = TrainerRank(msgspec.structs.replace(spec_of(tiny_model, tmp_path), algorithm=credit.model_dump()))
    rank.load()
    chosen = next(n for n, e in enumerate(batch.episodes[:5]) if e.trajectories[0].trajectory.turns.max() > 0)
    (trained,) = batch.episodes[chosen].trajectories
    turns, sampled = trained.trajectory.turns, trained.trajectory.sampled
    scored = dataclasses.replace(trained, potentials=np.maximum(turns, 0).astype(np.float32))
    episodes = list(batch.episodes)
    episodes[chosen] = dataclasses.replace(episodes[chosen], trajectories=(scored,))
    explained = rank.explain_step(dataclasses.replace(batch, episodes=tuple(episodes)))
    dist.destroy_process_group()
    of_outcome = explained.advantages[chosen][""]
    assert of_outcome != 0
    ((of_tokens,), (terms,)) = explained.token_advantages[chosen], explained.terms[chosen]
    assert of_tokens[sampled] == pytest.approx(of_outcome - turns[sampled])
    assert terms.advantages == pytest.approx(of_outcome - turns[trained.loss_mask])


def test_one_of_several_ranks_explains_nothing(tiny_model, tmp_path, batch):
    with pytest.raises(ValueError, match="explained by one rank, this trainer has 2"):
        TrainerRank(spec_of(tiny_model, tmp_path, num_ranks=2)).explain_step(batch)


def test_a_batch_of_episodes_without_trajectories_is_explained_too(rank, batch):
    empty = tuple(dataclasses.replace(episode, trajectories=()) for episode in batch.episodes)
    explained = rank.explain_step(dataclasses.replace(batch, episodes=empty))
    assert explained.terms == ((),) * len(empty)
    assert explained.report.version == PolicyVersion(0, 1)
