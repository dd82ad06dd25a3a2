"""What a model folder is to this platform, found before anything is started."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.orchestration.model_files import context_tokens, read_model_config, read_model_files
from agentrl.tokens.chat import ChatFormat
from agentrl.tokens.config import ChatConfig
from agentrl.tokens.selection import end_token_ids
from agentrl.trainer.config import LoraConfig
from agentrl.types.errors import AgentRLError
from agentrl.types.message import Message, Role

if TYPE_CHECKING:
    from agentrl.models.verification import Verdict

_CHOOSE_MODEL = "choose a model of a verified architecture; the README has the table"
_BYTES_TO_TRAIN = 16
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8"}


class Level(StrEnum):
    """What a finding means for a run."""

    GOOD = "ok"
    NOTE = "note"
    BAD = "BAD"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found, in words; a bad one stops a run, and its text says what to do.

    Example: ``Finding(Level.GOOD, "context", "32,768 tokens")``.
    """

    level: Level
    topic: str
    text: str


def check_model(folder: Path, chat: ChatConfig) -> Iterator[Finding]:
    """Everything that a run would find out about a model folder, one finding after the other.

    Raises:
        ConfigError: there is no model in the folder at all.
    """
    config = read_model_config(folder)
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "architecture": lambda: _architecture(folder),
        "chat format": lambda: _format(folder, chat),
        "context": lambda: _context(config),
        "trains": lambda: _parameters(folder),
    }
    for topic, check in checks.items():
        try:
            yield from check()
        except AgentRLError as error:
            yield Finding(Level.BAD, topic, str(error))


def _architecture(folder: Path) -> Iterator[Finding]:
    """Whether trainer and engine compute what the model's own code computes."""
    from agentrl.engine.verification import check_engine  # loads torch and transformers
    from agentrl.trainer.verification import check_trainer

    for check in (check_trainer, check_engine):
        yield _verdict(check(folder))


def _verdict(verdict: Verdict) -> Finding:
    """What a verdict of either side's verification says."""
    if not verdict.is_verified:
        text = f"{verdict.architecture} is refused: {verdict.reason}; {_CHOOSE_MODEL}"
        return Finding(Level.BAD, verdict.side, text)
    text = f"{verdict.architecture}, verified: within {verdict.max_gap_nats:.1e} nats of the model's own code"
    return Finding(Level.GOOD, verdict.side, text)


def _format(folder: Path, config: ChatConfig) -> Iterator[Finding]:
    chat = ChatFormat.load(folder, config)
    abilities = chat.abilities
    yield Finding(Level.GOOD, "chat format", chat.source)
    if abilities.has_tools:
        yield Finding(Level.GOOD, "tools", "named in the prompt; calls are written and read back; results are taken")
    if abilities.reasoning:
        yield Finding(Level.GOOD, "reasoning", "written in replies and read back")
    for text in abilities.limits():
        yield Finding(Level.NOTE, "cannot", text)
    for text in abilities.notes():
        yield Finding(Level.NOTE, "template", text)
    yield from _ends(folder, chat)


def _ends(folder: Path, chat: ChatFormat) -> Iterator[Finding]:
    """What ends a reply, and whether the model's files agree with its template."""
    tokenizer = chat.tokenizer
    said = int(chat.complete(Message(Role.ASSISTANT, "Yes."))[-1])
    declared = end_token_ids(folder, tokenizer)
    end, stops = tokenizer.decode(said), ", ".join(tokenizer.decode(token) for token in chat.stop_token_ids)
    yield Finding(Level.GOOD, "end tokens", f"a reply ends with {end}; runs stop at {stops}")
    listed = ", ".join(tokenizer.decode(token) for token in declared) or "none"
    if said not in declared:
        yield Finding(
            Level.NOTE,
            "end tokens",
            f"the model's files name {listed}, not {end}: runs stop all the same, other programs may not; add {said} "
            "to eos_token_id in generation_config.json",
        )
    elif set(declared) - set(chat.stop_token_ids):
        yield Finding(Level.NOTE, "end tokens", f"the model's files name {listed}: runs stop only at {stops}")


def _context(config: Mapping[str, Any]) -> Iterator[Finding]:
    length = context_tokens(config)
    if length is None:
        yield Finding(Level.NOTE, "context", "config.json gives no context length; set rollout.limits yourself")
        return
    windows = {**config, **(config.get("text_config") or {})}.get("sliding_window")
    yield Finding(Level.GOOD, "context", f"{length:,} tokens" + (f", windows of {windows:,}" if windows else ""))


def _parameters(folder: Path) -> Iterator[Finding]:
    """What trains, read from the heads of the weight files."""
    tensors = read_model_files(folder).tensors
    sizes = Counter[str]()
    for tensor in tensors.values():
        sizes[_DTYPES.get(tensor.dtype, tensor.dtype)] += math.prod(tensor.shape)
    total, stored = sum(sizes.values()), " and ".join(sorted(sizes))
    tied = "not tied" if any("lm_head" in name for name in tensors) else "tied"
    yield Finding(
        Level.GOOD,
        "trains",
        f"{total:,} parameters, stored as {stored}, output layer {tied} to the embeddings; all of them with AdamW in "
        f"float32 take {_size(total * _BYTES_TO_TRAIN)} before activations",
    )
    targets = LoraConfig().target_modules
    missing = [name for name in targets if not any(f".{name}." in tensor for tensor in tensors)]
    if missing:
        text = f"no layers {', '.join(missing)}: for LoRA set trainer.lora.target_modules to names that this model has"
        yield Finding(Level.NOTE, "adapters", text)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
