from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trainer_reference import make_batch, plain_network
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.inference.checksum import tensor_checksum
from agentrl.trainer.checkpoint import restore_checkpoint, save_checkpoint, stage_weights
from agentrl.trainer.config import OptimizerConfig, TrainerConfig
from agentrl.trainer.model import PolicyModel, full_weights, load_policy
from agentrl.trainer.optimizer import OptimizerSet
from agentrl.trainer.selection import select_sequences
from agentrl.trainer.step import run_step
from agentrl.types.errors import ConfigError, StorageError
from agentrl.types.version import PolicyVersion

pytestmark = pytest.mark.usefixtures("process_group")

KINDS = ("adamw", "sgd", "muon")
V1 = PolicyVersion(0, 1)


class Training:
    """A policy with its optimizer."""

    def __init__(self, model: Path, kind: str) -> None:
        self.config = TrainerConfig(optimizer=OptimizerConfig(kind=kind, learning_rate=0.01, weight_decay=0.1))
        self.policy: PolicyModel = load_policy(model, self.config)
        self.optimizer = OptimizerSet(self.policy, self.config.optimizer)
        self.model = model

    def step(self, batch) -> None:
        algorithm = AlgorithmConfig()
        sequences = select_sequences(batch, algorithm)
        run_step(self.policy, self.optimizer, sequences, algorithm, self.config, 1.0, is_gate=False)

    def save(self, folder: Path) -> None:
        stage_weights(self.policy, self.model, "main", V1, folder)
        save_checkpoint(self.policy, self.optimizer, folder)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in full_weights(self.policy).items()}


def assert_equal(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == other.keys()
    different = [name for name in mine if not torch.equal(mine[name], other[name])]
    assert not different


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_a_checkpoint_to_the_last_bit(kind, tiny_model, network, tmp_path):
    batches = [make_batch(network, seed, noise=0.3) for seed in range(3)]
    first = Training(tiny_model, kind)
    first.step(batches[0])
    first.save(tmp_path / "checkpoint")
    saved = first.weights()
    first.step(batches[1])
    first.step(batches[2])
    second = Training(tiny_model, kind)
    restore_checkpoint(second.policy, second.optimizer, tmp_path / "checkpoint")
    assert_equal(second.weights(), saved)
    second.step(batches[1])
    second.step(batches[2])
    assert_equal(second.weights(), first.weights())


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_replaces_what_a_trainer_had_done_since(kind, tiny_model, network, tmp_path):
    batches = [make_batch(network, seed, noise=0.3) for seed in range(2)]
    training = Training(tiny_model, kind)
    training.step(batches[0])
    training.save(tmp_path / "checkpoint")
    training.step(batches[1])
    once = training.weights()
    restore_checkpoint(training.policy, training.optimizer, tmp_path / "checkpoint")
    training.step(batches[1])
    assert_equal(training.weights(), once)


@pytest.mark.parametrize("kind", KINDS)
def test_saving_disturbs_nothing_not_even_before_the_first_step(kind, tiny_model, network, tmp_path):
    batch = make_batch(network, noise=0.3)
    saving, silent = Training(tiny_model, kind), Training(tiny_model, kind)
    saving.save(tmp_path / "zero")
    for training in (saving, silent):
        training.step(batch)
    assert_equal(saving.weights(), silent.weights())
    restored = Training(tiny_model, kind)
    restore_checkpoint(restored.policy, restored.optimizer, tmp_path / "zero")
    restored.step(batch)
    assert_equal(restored.weights(), silent.weights())


@pytest.mark.parametrize("kind", ["tiny", "odd"])
def test_staged_weights_load_in_transformers_and_give_the_same_logits(kind, tiny_model, odd_model, network, tmp_path):
    model = tiny_model if kind == "tiny" else odd_model
    training = Training(model, "sgd")
    training.step(make_batch(network, noise=0.3))
    manifest = stage_weights(training.policy, model, "main", V1, tmp_path / "v1")
    loaded = plain_network(tmp_path / "v1")
    expected = plain_network(model)
    ids = torch.arange(20)[None]
    assert not torch.allclose(loaded(ids).logits, expected(ids).logits)
    weights = training.weights()
    expected.load_state_dict(weights, strict=kind == "odd")
    assert torch.equal(loaded(ids).logits, expected(ids).logits)
    assert type(AutoModelForCausalLM.from_pretrained(manifest.path)) is type(loaded)
    exported, own = AutoTokenizer.from_pretrained(manifest.path), AutoTokenizer.from_pretrained(model)
    assert exported.encode("select") == own.encode("select")
    assert exported.chat_template == own.chat_template
    assert kind == "odd" or exported.chat_template is not None


def test_a_manifest_says_what_was_staged(tiny_model, tmp_path):
    training = Training(tiny_model, "sgd")
    manifest = stage_weights(training.policy, tiny_model, "main", V1, tmp_path / "v1")
    weights = training.weights()
    assert (manifest.policy, manifest.version, manifest.path) == ("main", V1, str(tmp_path / "v1"))
    narrow = {f"bfloat16:{name}": tensor_checksum(tensor.bfloat16()) for name, tensor in weights.items()}
    assert manifest.checksums == {name: tensor_checksum(tensor) for name, tensor in weights.items()} | narrow
    assert manifest.num_bytes == sum(4 * tensor.numel() for tensor in weights.values())
    assert "lm_head.weight" not in manifest.checksums


def test_staging_twice_to_one_folder_replaces_it_and_leaves_nothing_else(tiny_model, tmp_path):
    training = Training(tiny_model, "sgd")
    for _ in range(2):
        stage_weights(training.policy, tiny_model, "main", V1, tmp_path / "v1")
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


def test_weights_that_cannot_be_written_are_a_storage_error_that_names_the_folder(tiny_model, tmp_path):
    (tmp_path / "file").touch()
    training = Training(tiny_model, "sgd")
    with pytest.raises(StorageError, match=r"weights 0\.1 cannot be written to .*file/v1"):
        stage_weights(training.policy, tiny_model, "main", V1, tmp_path / "file" / "v1")


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer-0.pt"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "garbage"])
def test_a_checkpoint_that_cannot_be_read_is_a_storage_error_and_changes_nothing(file, damage, tiny_model, tmp_path):
    training = Training(tiny_model, "sgd")
    folder = tmp_path / "checkpoint"
    training.save(folder)
    whole = (folder / file).read_bytes()
    (folder / file).write_bytes({"cut": whole[: len(whole) // 2], "garbage": b"x" * 500}.get(damage, b""))
    if damage == "missing":
        (folder / file).unlink()
    before = training.weights()
    with pytest.raises(StorageError, match=r"checkpoint .* cannot be read"):
        restore_checkpoint(training.policy, training.optimizer, folder)
    assert_equal(training.weights(), before)


def test_a_folder_without_a_model_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no model at .*nowhere: config\.json is missing"):
        load_policy(tmp_path / "nowhere", TrainerConfig())
