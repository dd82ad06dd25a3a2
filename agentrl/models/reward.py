"""A process-reward model: a decoder with a head that says what a state is worth, at any token of a context."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from agentrl.models.reward_folder import check_files, found_version, stated_version
from agentrl.types.errors import ConfigError

_CLASSES = {
    "ForTokenClassification": AutoModelForTokenClassification,
    "ForSequenceClassification": AutoModelForSequenceClassification,
}
_UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)
_PROBE = (4, 8)  # tokens of a context, and of one that goes on behind it
_SAME = 1e-3


class RewardModel:
    """Values of states by a model folder of transformers, in float32.

    A head of one label gives its number as it is; one of two labels gives the probability of label 1. A head over
    sequences is put at any token like one over tokens: in a decoder the state up to there is all that it sees.
    `version` is that of the files which it was loaded from, `context_tokens` the longest context; None without bound.
    """

    def __init__(self, network: PreTrainedModel, version: str, device: str) -> None:
        self.version = version
        self.context_tokens: int | None = network.config.to_dict().get("max_position_embeddings")
        torch.nn.Module.to(network, torch.device(device))
        # What was read is a view of the file: a copy over it would change the weights in the midst of a batch.
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.data = tensor.data.clone()
        self._network, self._device = network.eval(), device

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> RewardModel:
        """Read a folder.

        Raises:
            ConfigError: it holds no such model, or one that cannot value a state by what came before it.
            FolderChangingError: its files are not those of its marker, before or after they were read.
        """
        stated = stated_version(folder)
        version = stated if stated is not None else found_version(folder)
        check_files(folder, version)
        network = _read(folder)
        check_files(folder, version)
        model = cls(network, version.name, device)
        model._check_direction(folder)
        return model

    @torch.no_grad()
    def values(self, contexts: Sequence[np.ndarray], positions: Sequence[Sequence[int]]) -> list[list[float]]:
        """Values of each context at some of its tokens, in one padded forward pass.

        Args:
            contexts: N token prefixes, [L] each.
            positions: of each context the tokens at which it is valued, counted from 0.
        """
        logits_PC = head_outputs(self._network, contexts, positions, self._device).double()
        values_P = logits_PC[:, 0] if logits_PC.shape[-1] == 1 else logits_PC.softmax(-1)[:, 1]
        values = iter(values_P.tolist())
        return [[next(values) for _ in places] for places in positions]

    def _check_direction(self, folder: Path) -> None:
        """Raises ConfigError if a state's value depends on what comes after it."""
        short, long = (np.arange(1, length + 1) for length in _PROBE)
        alone = self.values([short], [range(len(short))])[0]
        followed = self.values([long], [range(len(short))])[0]
        if not np.allclose(alone, followed, atol=_SAME, rtol=_SAME, equal_nan=True):
            raise ConfigError(
                f"the reward model in {folder} values a state by what comes after it; choose a decoder, which reads "
                "from left to right"
            )


def use_device(where: str, device: str, threads: int) -> None:
    """Compute with so many cores in this process. Raises ConfigError, which says `where`, if the device is not here."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{where}: device is cuda, and PyTorch finds none here; set it to cpu")
    torch.set_num_threads(threads)


def head_outputs(
    network: PreTrainedModel, contexts: Sequence[np.ndarray], positions: Sequence[Sequence[int]], device: str
) -> torch.Tensor:
    """What the head `score` says, [P, labels], of each context at its positions, one context after the other."""
    longest = max(len(ids) for ids in contexts)
    ids_NL = torch.zeros(len(contexts), longest, dtype=torch.long)
    for row, ids in enumerate(contexts):
        ids_NL[row, : len(ids)] = torch.from_numpy(np.asarray(ids, np.int64))
    rows = [row for row, places in enumerate(positions) for _ in places]
    columns = [int(place) for places in positions for place in places]
    hidden_NLH = network.base_model(ids_NL.to(device))[0]  # unmasked: what pads a context comes behind all that is read
    outputs_PC: torch.Tensor = network.get_submodule("score")(hidden_NLH[rows, columns])
    return outputs_PC


def _read(folder: Path) -> PreTrainedModel:
    """Raises ConfigError."""
    try:
        config = AutoConfig.from_pretrained(folder)
    except _UNREADABLE as error:
        raise ConfigError(f"no reward model in {folder}: {error}; make one with `agentrl prm train`") from error
    name = next(iter(config.architectures or ()), "none")
    kind = next((kind for ending, kind in _CLASSES.items() if name.endswith(ending)), None)
    if kind is None:
        raise ConfigError(
            f"the model in {folder} is of architecture {name}; a reward model is one of {' or '.join(_CLASSES)}: fit "
            "one with `agentrl prm train`"
        )
    if config.num_labels not in (1, 2):
        raise ConfigError(
            f"the reward model in {folder} has {config.num_labels} labels; it must have 1, a number, or 2, the second "
            "of which is the good one"
        )
    disable_progress_bar()
    try:
        network, loaded = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    except _UNREADABLE as error:
        raise ConfigError(f"the reward model in {folder} cannot be read: {error}") from error
    if missing := sorted(loaded["missing_keys"]):
        raise ConfigError(f"the weights of the reward model in {folder} lack {missing[0]}; fit or convert it again")
    if not isinstance(dict(network.named_children()).get("score"), torch.nn.Linear):
        raise ConfigError(
            f"{name} in {folder} has no linear head `score` over its hidden states, as decoders have; choose another"
        )
    read: PreTrainedModel = network
    return read
