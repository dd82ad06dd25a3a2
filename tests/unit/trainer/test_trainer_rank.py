"""One rank, called as its process would call it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from trainer_reference import make_batch
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.testing.tiny_architectures import tiny_config
from agentrl.trainer.canary import compute_canary
from agentrl.trainer.config import OptimizerConfig, TrainerConfig
from agentrl.trainer.rank import RankSpec, TrainerRank
from agentrl.trainer.selection import select_sequences
from agentrl.types.batch import TrainBatch
from agentrl.types.errors import ConfigError, TrainerError
from agentrl.types.version import PolicyVersion

TRAINER = TrainerConfig(optimizer=OptimizerConfig(kind="sgd", learning_rate=0.01))


def spec_of(model: Path, folder: Path, trainer: TrainerConfig = TRAINER) -> RankSpec:
    return RankSpec(
        policy="main",
        model=str(model),
        version=PolicyVersion(0, 0),
        rank=0,
        num_ranks=1,
        rendezvous=str(folder / "rendezvous"),
        temperature=1.0,
        trainer=trainer.model_dump(),
        algorithm=AlgorithmConfig().model_dump(),
    )


@pytest.fixture
def rank(tiny_model: Path, network: PreTrainedModel, tmp_path: Path) -> Iterator[TrainerRank]:
    rank = TrainerRank(spec_of(tiny_model, tmp_path))
    assert rank.load() == {"parameters": sum(p.numel() for p in network.parameters())}
    yield rank
    dist.destroy_process_group()


def at(batch: TrainBatch, step: int) -> TrainBatch:
    return dataclasses.replace(batch, version=PolicyVersion(0, step))


def agreeing(network: PreTrainedModel) -> TrainBatch:
    """A batch whose groups agree, so that there is nothing to learn."""
    return make_batch(network, rewards=((1.0, 1.0), (0.0, 0.0)), noise=1.0)


def test_a_rank_whose_machine_has_not_the_address_of_its_place_is_refused(tiny_model, tmp_path, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    spec = msgspec.structs.replace(
        spec_of(tiny_model, tmp_path), rendezvous="tcp://192.0.2.200:21774", host="192.0.2.201"
    )
    with pytest.raises(ConfigError, match=r"no network interface of this machine has the address 192\.0\.2\.201"):
        TrainerRank(spec).load()


def test_a_step_makes_the_next_version_and_reports_it(rank, network):
    report = rank.step(make_batch(network))
    assert report.version == PolicyVersion(0, 1)
    assert report.metrics["trainer/grad_norm"] > 0
    assert report.metrics["time/train_step_s"] > 0
    assert rank.step(at(make_batch(network, noise=1.0), 1)).version == PolicyVersion(0, 2)


def test_the_second_step_of_a_decay_moves_the_weights_by_the_smaller_rate(tiny_model, network, tmp_path):
    def moved(decay_steps: int) -> float:
        optimizer = OptimizerConfig(kind="sgd", learning_rate=0.01, momentum=0.0, decay_steps=decay_steps)
        folder = tmp_path / str(decay_steps)
        folder.mkdir()
        spec = spec_of(tiny_model, folder, TrainerConfig(optimizer=optimizer, max_gap_nats=100.0))
        rank = TrainerRank(msgspec.structs.replace(spec, version=PolicyVersion(0, 1)))
        rank.load()
        try:
            before = [p.full_tensor().detach().clone() for p in rank._policy.parameters()]
            report = rank.step(at(make_batch(network), 1))
            assert report.metrics["trainer/learning_rate"] == pytest.approx(0.01 if decay_steps == 0 else 0.0055)
            after = [p.full_tensor().detach() for p in rank._policy.parameters()]
        finally:
            dist.destroy_process_group()
        return float(sum((a - b).square().sum() for a, b in zip(after, before, strict=True)).sqrt())

    assert moved(2) == pytest.approx(0.55 * moved(0), rel=1e-4)


@pytest.mark.parametrize("step", [0, 2])
def test_a_batch_for_another_version_is_refused(step, rank, network):
    rank.step(make_batch(network))
    with pytest.raises(ValueError, match=rf"the batch is for version 0\.{step}, the trainer is at 0\.1"):
        rank.step(at(make_batch(network), step))


def test_a_batch_with_nothing_to_learn_makes_a_version_without_touching_the_weights(rank, network, tmp_path):
    before = rank.stage(PolicyVersion(0, 0), str(tmp_path / "v0")).checksums
    report = rank.step(agreeing(network))
    assert report.version == PolicyVersion(0, 1)
    assert rank.stage(PolicyVersion(0, 1), str(tmp_path / "v1")).checksums == before
    for name in ("trainer/loss", "trainer/grad_norm", "trainer/optimizer_steps"):
        assert report.metrics[name] == 0.0, name


def test_staged_weights_say_since_which_version_they_are_unchanged(rank, network, tmp_path):
    def since(step: int) -> PolicyVersion | None:
        return rank.stage(PolicyVersion(0, step), str(tmp_path / f"v{step}")).unchanged_since

    assert since(0) == PolicyVersion(0, 0)
    rank.step(agreeing(network))
    assert since(1) == PolicyVersion(0, 0)
    rank.step(at(make_batch(network), 1))
    assert since(2) == PolicyVersion(0, 2)
    rank.step(at(agreeing(network), 2))
    rank.step(at(agreeing(network), 3))
    assert since(4) == PolicyVersion(0, 2)
    rank.rebase(PolicyVersion(1, 4))
    assert rank.stage(PolicyVersion(1, 4), str(tmp_path / "rebased")).unchanged_since == PolicyVersion(1, 4)


def test_weights_that_imitation_has_changed_are_those_of_no_known_version(rank, network, tmp_path):
    rank.supervised_step(select_sequences(make_batch(network), AlgorithmConfig()), 1.0)
    assert rank.stage(PolicyVersion(0, 0), str(tmp_path / "v0")).unchanged_since is None


def test_the_gate_waits_for_the_first_step_that_has_something_to_compare(rank, network):
    rank.step(agreeing(network))
    rank.step(at(make_batch(network, noise=1.0, staleness=1), 1))
    with pytest.raises(TrainerError, match="first-step gate"):
        rank.step(at(make_batch(network, noise=1.0, staleness=0), 2))


def test_weights_of_another_version_are_not_staged(rank, tmp_path):
    with pytest.raises(ValueError, match=r"asked to stage version 0\.1, the trainer is at 0\.0"):
        rank.stage(PolicyVersion(0, 1), str(tmp_path / "v1"))


def test_every_step_changes_the_checksums_that_engines_must_show(rank, network, tmp_path):
    before = rank.stage(PolicyVersion(0, 0), str(tmp_path / "v0")).checksums
    rank.step(make_batch(network))
    after = rank.stage(PolicyVersion(0, 1), str(tmp_path / "v1")).checksums
    assert before.keys() == after.keys()
    assert all(before[name] != after[name] for name in before if not name.startswith("bfloat16:"))


def test_the_canary_is_what_the_staged_weights_say_of_the_last_batch(rank, network, tmp_path):
    assert rank.stage(PolicyVersion(0, 0), str(tmp_path / "v0")).canary is None, "no batch, no canary"
    rank.step(make_batch(network))
    manifest = rank.stage(PolicyVersion(0, 1), str(tmp_path / "v1"))
    staged = AutoModelForCausalLM.from_pretrained(tmp_path / "v1", dtype=torch.float32).eval()
    ids = torch.tensor([manifest.canary.token_ids])
    with torch.no_grad():
        logprobs = staged(ids).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    assert list(manifest.canary.logprobs) == pytest.approx(expected, abs=1e-5)
    likeliest = logprobs[-1].argsort(descending=True)[:16]
    assert list(manifest.canary.next_ids) == likeliest.tolist()
    assert list(manifest.canary.next_logprobs) == pytest.approx(logprobs[-1][likeliest].tolist(), abs=1e-5)


@pytest.mark.parametrize("name", ["granite", "gemma2", "phi", "cohere"])
def test_the_canary_has_the_scale_the_cap_and_the_bias_of_the_head(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(tiny_config(name), dtype=torch.float32).eval()
    if made.get_output_embeddings().bias is not None:
        torch.nn.init.normal_(made.get_output_embeddings().bias)
    made.save_pretrained(tmp_path / "model")
    rank = TrainerRank(spec_of(tmp_path / "model", tmp_path))
    rank.load()
    try:
        canary = compute_canary(rank._policy, [5, 6, 7, 8], "cpu")
    finally:
        dist.destroy_process_group()
    with torch.no_grad():
        logprobs_V = made(torch.tensor([[5, 6, 7, 8]])).logits[0, -1].log_softmax(-1)
    expected = logprobs_V.topk(16)
    assert canary is not None
    assert list(canary.next_ids) == expected.indices.tolist()
    assert list(canary.next_logprobs) == pytest.approx(expected.values.tolist(), abs=1e-5)


@pytest.mark.parametrize(("interval", "steps"), [(0, []), (1, [0, 1, 2]), (2, [0, 2])])
def test_the_gap_without_replay_is_reported_at_its_interval(interval, steps, tiny_model, network, tmp_path):
    trainer = TRAINER.model_copy(update={"gap_report_interval_steps": interval, "max_gap_nats": 100.0})
    rank = TrainerRank(spec_of(tiny_model, tmp_path, trainer))
    rank.load()
    try:
        reports = [rank.step(at(make_batch(network), step)) for step in range(3)]
    finally:
        dist.destroy_process_group()
    assert [n for n, r in enumerate(reports) if "trainer/fresh_gap_mean_no_replay_nats" in r.metrics] == steps


def test_more_ranks_than_gpus_are_refused_by_name(tiny_model, tmp_path):
    num_gpus = torch.cuda.device_count()
    spec = spec_of(tiny_model, tmp_path, TRAINER.model_copy(update={"device": "cuda"}))
    rank = TrainerRank(msgspec.structs.replace(spec, num_ranks=num_gpus + 1))
    with pytest.raises(ConfigError, match=rf"with {num_gpus + 1} ranks, .* finds {num_gpus} CUDA devices"):
        rank.load()
