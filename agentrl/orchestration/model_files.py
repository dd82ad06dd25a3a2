"""What the files of a model folder say of it: JSON and the headers of safetensors, without torch or transformers."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from agentrl.models.verified import VERIFIED
from agentrl.tokens.tokenizer import read_json
from agentrl.types.errors import ConfigError

_AGAIN = "copy or convert the model again"
_INDEX = "model.safetensors.index.json"
_SETTINGS = ("generation_config.json", "tokenizer_config.json")
_SINGLE = "model.safetensors"
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1,
               "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}  # fmt: skip
_KNOWN_TYPES = {architecture.model_type for architecture in VERIFIED}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: its type as safetensors calls it, and its shape.

    Example: ``StoredTensor("BF16", (4096, 4096))``.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model folder as its files describe it: the settings of ``config.json``, and the tensors by name."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def read_model_files(folder: Path) -> ModelFiles:
    """Read a model folder, and compare with each other what its files say.

    Raises:
        ConfigError: one of them is missing or damaged, or two of them disagree; names it, and says what to do.
    """
    config = read_model_config(folder)
    for name in _SETTINGS:
        read_json(folder / name)
    files = ModelFiles(folder, config, read_tensors(folder))
    _check_kind(files)
    # What other types of models call their tensors, and which a layer has, is not known here.
    if config["model_type"] in _KNOWN_TYPES:
        _check_layers(files)
        _check_shapes(files)
    return files


def read_model_config(folder: Path) -> Mapping[str, Any]:
    """``config.json`` of a model folder. Raises ConfigError if it is missing, damaged, or gives impossible sizes."""
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"no model at {folder}: config.json is missing; make one with `agentrl warmstart`, or give a folder made "
            "by save_pretrained"
        )
    config = read_json(file)
    if not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{file} names no model_type; {_AGAIN}")
    for name in _SIZES:
        value = config.get(name, 1)
        if type(value) is not int or value < 1:
            raise ConfigError(f"{file}: {name} is {value!r}, not a number above 0; {_AGAIN}")
    return config


def context_tokens(config: Mapping[str, Any]) -> int | None:
    """Longest context in tokens by the settings of a model; None if they give none."""
    nested = config.get("text_config")
    values = {**config, **nested} if isinstance(nested, dict) else config
    return next((values[name] for name in _LENGTHS if type(values.get(name)) is int), None)


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Names of a folder's tensors with type and shape; the tensors themselves are not read.

    Raises:
        ConfigError: there are none, a file is damaged, or one that the index names is missing.
    """
    if (folder / _SINGLE).is_file():
        return dict(_tensors_of(folder / _SINGLE))
    if not (folder / _INDEX).is_file():
        others = sorted(path.name for path in folder.glob("*.bin"))
        found = f" ({', '.join(others)} is not read)" if others else ""
        raise ConfigError(f"no safetensors weights in {folder}{found}; save_pretrained writes them")
    places = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ConfigError(f"{folder / _INDEX} has no weight_map of names and files; {_AGAIN}")
    found_in = {shard: dict(_tensors_of(folder / shard)) for shard in sorted(set(places.values()))}
    for name, shard in places.items():
        if name not in found_in[shard]:
            raise ConfigError(f"{folder / shard} lacks {name}, which {_INDEX} says is there; {_AGAIN}")
    return {name: found_in[shard][name] for name, shard in places.items()}


def _tensors_of(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Raises ConfigError unless the header fits the file, and every tensor its place."""
    try:
        with file.open("rb") as stream:
            num_bytes = file.stat().st_size
            header, start = _read_header(stream, num_bytes)
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"{file} cannot be read: {error}; {_AGAIN}") from error
    end = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            tensor, last = _read_entry(entry)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{file} describes {name} wrongly ({error}); {_AGAIN}") from error
        end = max(end, last)
        yield name, tensor
    if start + end != num_bytes:
        what = "cut off" if num_bytes < start + end else "too long"
        raise ConfigError(f"{file} is {what}: it has {num_bytes:,} bytes, and its header {start + end:,}; {_AGAIN}")


def _read_header(stream: BinaryIO, num_bytes: int) -> tuple[dict[str, Any], int]:
    """The header of a file of safetensors, and where its tensors begin. Raises ValueError or struct.error."""
    if num_bytes < struct.calcsize("<Q"):
        raise ValueError(f"it is cut off: it has {num_bytes} bytes")
    (length,) = struct.unpack("<Q", stream.read(8))
    if length > num_bytes - 8:
        raise ValueError("it is cut off within its header, or no file of safetensors")
    header = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    return header, 8 + length


def _read_entry(entry: Mapping[str, Any]) -> tuple[StoredTensor, int]:
    """A tensor, and the byte behind its last. Raises KeyError, TypeError or ValueError."""
    dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, first, last)):
        raise ValueError(f"shape {shape} at {first} to {last}")
    if dtype in _ITEM_BYTES and last - first != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise ValueError(f"{last - first} bytes for a shape {shape} of {dtype}")
    return StoredTensor(dtype, tuple(shape)), last


def _check_kind(files: ModelFiles) -> None:
    """Raises ConfigError for what trainer and engine refuse by the settings alone."""
    config, what = files.config, f"the model at {files.folder} ({files.config['model_type']})"
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"{what} has an encoder and a decoder, and agentrl runs decoders alone; choose another model")
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        method = quantization.get("quant_method", "an unknown method")
        raise ConfigError(f"the weights of {what} are quantized ({method}); give a folder in bfloat16 or float32")
    if not any(_LAYER.search(name) for name in files.tensors):
        raise ConfigError(
            f"{what} has no `layers`, where agentrl looks for the repeated layers of a decoder; choose a model of a "
            "verified type: the README has the table"
        )


def _check_layers(files: ModelFiles) -> None:
    """Raises ConfigError if there are other layers than ``config.json`` says, or if one of them lacks a tensor."""
    declared = files.config.get("num_hidden_layers", 0)
    layers: dict[int, set[str]] = {}
    for match in filter(None, map(_LAYER.search, files.tensors)):
        layers.setdefault(int(match[1]), set()).add(match[2])
    # Layers that predict further tokens come last, and no forward pass uses them.
    spare = files.config.get("num_nextn_predict_layers") or 0
    if len(layers) > declared + spare or not layers.keys() >= set(range(declared)):
        raise ConfigError(
            f"{files.folder}: config.json says {declared} layers, and the weights have {len(layers)}; {_AGAIN}"
        )
    names = {name.rpartition("model.")[2] for name in files.tensors}
    outer = ["embed_tokens.weight", *(["lm_head.weight"] if files.config.get("tie_word_embeddings") is False else [])]
    missing = [name for name in outer if name not in names]
    if not any("experts" in name for name in names):  # else layers may be of two kinds
        usual = set.union(*layers.values())
        missing += [f"layers.{n}.{name}" for n, has in sorted(layers.items()) for name in sorted(usual - has)]
    if missing:
        raise ConfigError(f"{files.folder}: the weights lack {missing[0]}; {_AGAIN}")


def _check_shapes(files: ModelFiles) -> None:
    """Raises ConfigError if a tensor has another shape than the sizes of ``config.json`` give it."""
    expected = _expected_shapes(files.config)
    for name, tensor in files.tensors.items():
        layer = _LAYER.search(name)
        known = layer[2] if layer else name.rpartition("model.")[2]
        shape = expected.get(known)
        if shape is not None and tensor.shape != shape:
            raise ConfigError(
                f"{files.folder}: {name} has the shape {list(tensor.shape)}, and by config.json it has {list(shape)}; "
                f"{_AGAIN}"
            )


def _expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors whose names mean the same in all models, as far as the settings give their sizes."""
    hidden, vocabulary = config.get("hidden_size"), config.get("vocab_size")
    inner, heads = config.get("intermediate_size"), config.get("num_attention_heads")
    shapes: dict[str, tuple[Any, ...]] = {
        "embed_tokens.weight": (vocabulary, hidden),
        "lm_head.weight": (vocabulary, hidden),
        "norm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    width = config.get("head_dim")
    if type(heads) is int and type(width) is int and not config.get("kv_lora_rank"):
        keys = (config.get("num_key_value_heads") or heads) * width
        shapes |= {
            "self_attn.q_proj.weight": (heads * width, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, heads * width),
        }
    return {name: shape for name, shape in shapes.items() if all(type(size) is int for size in shape)}
