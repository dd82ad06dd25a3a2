"""Model folders with every kind of damage, and models that do not fit their recipe."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.unit.cli.bad_case import Case, Make, both, case, edit_json, remove, train, write

_WEIGHTS, _CONFIG = "model/model.safetensors", "model/config.json"
_INDEX = "model/model.safetensors.index.json"
_AGAIN = "copy or convert the model again"
_TEMPLATE = "model/chat_template.jinja"


def _cut(file: str, num_bytes: int) -> Make:
    return lambda: Path(file).write_bytes(Path(file).read_bytes()[:num_bytes])


def _append(file: str, data: bytes) -> Make:
    return lambda: Path(file).write_bytes(Path(file).read_bytes() + data)


def _header(change: Callable[[dict[str, Any]], object]) -> Make:
    """Changes the header of the weights; the tensors stay."""

    def make() -> None:
        data = Path(_WEIGHTS).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        Path(_WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return make


def _entry(**values: object) -> Make:
    return _header(lambda header: header["model.norm.weight"].update(values))


def _renamed(old: str, new: str) -> Make:
    return _header(lambda header: header.update({new: header.pop(old)}))


def _sharded(index: object, *, has_shard: bool = True) -> Make:
    """The weights as one shard, and an index of any kind."""

    def make() -> None:
        shard = Path("model/model-00001-of-00001.safetensors")
        Path(_WEIGHTS).rename(shard) if has_shard else Path(_WEIGHTS).unlink()
        Path(_INDEX).write_text(index if isinstance(index, str) else json.dumps(index))

    return make


def _gpt2() -> None:
    """What the folder of another kind of model calls its settings and tensors."""
    edit_json(_CONFIG, model_type="gpt2")()
    _header(lambda header: [header.update({n.replace("layers", "h"): header.pop(n)}) for n in list(header)])()


_SHARD = "model-00001-of-00001.safetensors"
_DAMAGES: dict[str, tuple[Make, tuple[str, ...]]] = {
    "no-folder": (lambda: shutil.rmtree("model"), ("no model at model", "save_pretrained")),
    "a-file": (both(lambda: shutil.rmtree("model"), write("model", "x")), ("no model at model", "save_pretrained")),
    "config-missing": (remove(_CONFIG), ("config.json is missing", "save_pretrained")),
    "config-empty": (write(_CONFIG, ""), (_CONFIG, "cannot be read", _AGAIN)),
    "config-cut": (_cut(_CONFIG, 100), (_CONFIG, "cannot be read", _AGAIN)),
    "config-binary": (write(_CONFIG, b"\xff\xff"), (_CONFIG, "cannot be read", _AGAIN)),
    "config-list": (write(_CONFIG, "[]"), (_CONFIG, "holds a list", _AGAIN)),
    "config-bare": (write(_CONFIG, "{}"), ("names no model_type", _AGAIN)),
    "type-missing": (edit_json(_CONFIG, model_type=None), ("names no model_type", _AGAIN)),
    "type-number": (edit_json(_CONFIG, model_type=3), ("names no model_type", _AGAIN)),
    "hidden-text": (edit_json(_CONFIG, hidden_size="32"), ("hidden_size is '32'", _AGAIN)),
    "hidden-zero": (edit_json(_CONFIG, hidden_size=0), ("hidden_size is 0", _AGAIN)),
    "layers-negative": (edit_json(_CONFIG, num_hidden_layers=-1), ("num_hidden_layers is -1", _AGAIN)),
    "heads-half": (edit_json(_CONFIG, num_attention_heads=1.5), ("num_attention_heads is 1.5", _AGAIN)),
    "vocabulary-true": (edit_json(_CONFIG, vocab_size=True), ("vocab_size is True", _AGAIN)),
    "hidden-other": (edit_json(_CONFIG, hidden_size=64), ("has the shape", "by config.json", _AGAIN)),
    "vocabulary-other": (edit_json(_CONFIG, vocab_size=999), ("embed_tokens.weight has the shape", _AGAIN)),
    "inner-other": (edit_json(_CONFIG, intermediate_size=99), ("mlp.", "has the shape", _AGAIN)),
    "heads-other": (edit_json(_CONFIG, num_attention_heads=4), ("self_attn.", "has the shape", _AGAIN)),
    "width-other": (edit_json(_CONFIG, head_dim=8), ("self_attn.", "has the shape", _AGAIN)),
    "keys-other": (edit_json(_CONFIG, num_key_value_heads=1), ("self_attn.", "has the shape", _AGAIN)),
    "layers-more": (edit_json(_CONFIG, num_hidden_layers=3), ("config.json says 3 layers", "have 2", _AGAIN)),
    "layers-fewer": (edit_json(_CONFIG, num_hidden_layers=1), ("config.json says 1 layers", "have 2", _AGAIN)),
    "head-missing": (edit_json(_CONFIG, tie_word_embeddings=False), ("lack lm_head.weight", _AGAIN)),
    "encoder": (edit_json(_CONFIG, is_encoder_decoder=True), ("an encoder and a decoder", "choose another")),
    "quantized": (edit_json(_CONFIG, quantization_config={"quant_method": "awq"}), ("quantized (awq)", "bfloat16")),
    "gpt2": (_gpt2, ("(gpt2) has no `layers`", "choose a model of a verified type")),
    "weights-missing": (remove(_WEIGHTS), ("no safetensors weights in model", "save_pretrained writes them")),
    "weights-bin": (lambda: Path(_WEIGHTS).rename("model/pytorch_model.bin"), ("pytorch_model.bin is not read",)),
    "weights-folder": (both(remove(_WEIGHTS), lambda: Path(_WEIGHTS).mkdir()), ("no safetensors weights",)),
    "weights-empty": (write(_WEIGHTS, b""), (_WEIGHTS, "it is cut off: it has 0 bytes", _AGAIN)),
    "weights-four": (_cut(_WEIGHTS, 4), (_WEIGHTS, "it is cut off: it has 4 bytes", _AGAIN)),
    "weights-in-header": (_cut(_WEIGHTS, 300), (_WEIGHTS, "cut off within its header", _AGAIN)),
    "weights-half": (_cut(_WEIGHTS, 60_000), (f"{_WEIGHTS} is cut off", "60,000 bytes", _AGAIN)),
    "weights-one-byte": (_cut(_WEIGHTS, -1), (f"{_WEIGHTS} is cut off", _AGAIN)),
    "weights-longer": (_append(_WEIGHTS, b"x"), (f"{_WEIGHTS} is too long", _AGAIN)),
    "weights-text": (write(_WEIGHTS, "version https://git-lfs.github.com/spec/v1\n"), (_WEIGHTS, _AGAIN)),
    "weights-pointer": (write(_WEIGHTS, b"\x00" * 64), (_WEIGHTS, "cannot be read", _AGAIN)),
    "header-list": (write(_WEIGHTS, struct.pack("<Q", 2) + b"[]"), ("its header is no object", _AGAIN)),
    "header-broken": (write(_WEIGHTS, struct.pack("<Q", 2) + b"{]"), ("cannot be read", _AGAIN)),
    "header-none": (write(_WEIGHTS, struct.pack("<Q", 2) + b"{}"), ("has no `layers`", "verified type")),
    "entry-no-type": (_header(lambda h: h["model.norm.weight"].pop("dtype")), ("model.norm.weight", _AGAIN)),
    "entry-no-place": (_header(lambda h: h["model.norm.weight"].pop("data_offsets")), ("model.norm.weight", _AGAIN)),
    "entry-negative": (_entry(shape=[-32]), ("describes model.norm.weight wrongly", _AGAIN)),
    "entry-size": (_entry(shape=[31]), ("describes model.norm.weight wrongly", _AGAIN)),
    "entry-type": (_entry(dtype="F64"), ("describes model.norm.weight wrongly", _AGAIN)),
    "entry-text": (_header(lambda header: header.update(x="y")), ("describes x wrongly", _AGAIN)),
    "tensor-missing": (_renamed("model.layers.1.mlp.up_proj.weight", "other"), ("lack layers.1.mlp.up_proj", _AGAIN)),
    "embeddings-missing": (_renamed("model.embed_tokens.weight", "other"), ("lack embed_tokens.weight", _AGAIN)),
    "index-broken": (_sharded("{"), (_INDEX, "cannot be read", _AGAIN)),
    "index-empty": (_sharded({}), (_INDEX, "has no weight_map", _AGAIN)),
    "index-numbers": (_sharded({"weight_map": {"a": 3}}), (_INDEX, "has no weight_map", _AGAIN)),
    "index-strange": (_sharded({"weight_map": {"x": _SHARD}}), (f"{_SHARD} lacks x", _AGAIN)),
    "shard-missing": (_sharded({"weight_map": {"x": _SHARD}}, has_shard=False), (_SHARD, "cannot be read", _AGAIN)),
    "shard-cut": (both(_sharded({"weight_map": {"x": _SHARD}}), _cut(f"model/{_SHARD}", -9)), ("is cut off", _AGAIN)),
}
_TALK: dict[str, tuple[Make, tuple[str, ...]]] = {
    "tokenizer-missing": (remove("model/tokenizer.json"), ("no tokenizer.json", "save the tokenizer")),
    "tokenizer-broken": (write("model/tokenizer.json", "{}"), ("model/tokenizer.json cannot be read", _AGAIN)),
    "tokenizer-cut": (_cut("model/tokenizer.json", 999), ("model/tokenizer.json cannot be read", _AGAIN)),
    "settings-broken": (write("model/tokenizer_config.json", "{"), ("tokenizer_config.json cannot be read", _AGAIN)),
    "generation-broken": (
        write("model/generation_config.json", "["),
        ("generation_config.json cannot be read", _AGAIN),
    ),
    "template-broken": (write(_TEMPLATE, "{% for"), ("policies.main", "is not valid Jinja")),
    "template-refuses": (write(_TEMPLATE, "{{ raise_exception('no') }}"), ("refuses a single user message", "choose")),
    "template-fails": (write(_TEMPLATE, "{{ nothing.at.all }}"), ("policies.main", "chat_template.jinja")),
}
_RENDERERS = {
    "qwen4": ("no renderer 'qwen4'", "did you mean 'qwen3"),
    "glm-4.5": ("chat.renderer 'glm-4.5' does not fit model",),
    "nothere:Renderer": ("chat.renderer 'nothere:Renderer'",),
    "json:loads": ("chat.renderer 'json:loads'",),
}
_ELSEWHERE = ("weights-half", "config-cut", "layers-more", "gpt2")

CASES: tuple[Case, ...] = (
    *(train(f"model-{name}", make=make, says=says) for name, (make, says) in _DAMAGES.items()),
    *(train(f"talk-{name}", make=make, says=says) for name, (make, says) in _TALK.items()),
    *(train(f"renderer-{name}", f"policies.main.chat.renderer={name}", says=("policies.main", *says))
      for name, says in _RENDERERS.items()),
    train("renderer-options", "policies.main.chat.renderer=qwen3", "policies.main.chat.options.thinkin=true",
          says=("chat.renderer 'qwen3'", "thinkin")),
    *(case(f"eval-{n}", "eval", "recipe.toml", make=_DAMAGES[n][0], says=_DAMAGES[n][1]) for n in _ELSEWHERE),
    *(case(f"engine-{n}", "engine", "model", "--port", "1", make=_DAMAGES[n][0], says=_DAMAGES[n][1])
      for n in _ELSEWHERE),
    *(case(f"warmstart-{n}", "warmstart", "warmstart.toml", 'model={kind="folder", path="model"}',
           make=_DAMAGES[n][0], says=_DAMAGES[n][1]) for n in _ELSEWHERE),
    case("engine-nowhere", "engine", "nowhere", "--port", "1", says=("no model at nowhere", "save_pretrained")),
    case("check-nowhere", "model", "check", "nowhere", says=("no model at nowhere", "save_pretrained")),
    case("check-config-cut", "model", "check", "model", make=_cut(_CONFIG, 100), says=("cannot be read", _AGAIN)),
)  # fmt: skip
