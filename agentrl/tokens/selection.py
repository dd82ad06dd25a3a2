"""Chooses the renderer of a model by what is in its folder, never by what the folder is called."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError
from renderers import Renderer, RendererConfig, create_renderer

from agentrl.tokens.config import ChatConfig
from agentrl.tokens.plain_forms import message_dicts, tool_dicts
from agentrl.tokens.template import ChatTemplate, TemplateRefusedError
from agentrl.tokens.template_renderer import TemplateRenderer
from agentrl.tokens.tokenizer import FastTokenizer, read_json
from agentrl.types.errors import ConfigError
from agentrl.types.message import Message, Role, ToolCall, ToolSpec

CHATML = "agentrl.tokens.chatml:ChatMLToolRenderer"
_log = logging.getLogger(__name__)
_UNFIT = (ValueError, TypeError, KeyError, ImportError, AssertionError, OSError, NotImplementedError)
_NOT_CANDIDATES = ("auto", "default", "custom")
# Making this one reads a vocabulary from the network: it is not made for models that it cannot fit.
_NEEDED_TOKENS = {"gpt-oss": "<|channel|>"}
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_PROBE_TOOLS = (
    ToolSpec(
        "look",
        'Looks at <a> row\'s "cells".',
        {"type": "object", "properties": {"row": {"type": "integer"}, "name": {"type": "string"}}, "required": ["row"]},
    ),
    ToolSpec("stop", "Stops."),
)
_SYSTEM = Message(Role.SYSTEM, "Be brief.")
_QUESTION = Message(Role.USER, "What is in row 3?\n")
_CALLS = Message(
    Role.ASSISTANT,
    "I look.",
    (
        ToolCall("call-0", "look", {"row": 3, "name": "é", "deep": True, "cells": [0.5, {"a": None}]}),
        ToolCall("call-1", "stop", {}),
    ),
    reasoning="I should look.",
)
_CALL = Message(Role.ASSISTANT, "", _CALLS.tool_calls[:1])
_RESULTS = (Message(Role.TOOL, '{"cells": [1]}', tool_call_id="call-0"), Message(Role.TOOL, "", tool_call_id="call-1"))
_ANSWER = Message(Role.ASSISTANT, "It has 1.", reasoning="One cell.")
_PLAIN = (
    (_QUESTION,),
    (_SYSTEM, _QUESTION),
    (_SYSTEM, _QUESTION, Message(Role.ASSISTANT, "A 1."), Message(Role.USER, "And in row 4?")),
)
_WITH_TOOLS = (
    (_QUESTION,),
    (_SYSTEM, _QUESTION, _CALL, _RESULTS[0]),
    (_SYSTEM, _QUESTION, _CALLS, *_RESULTS),
    (_QUESTION, _CALLS, *_RESULTS, _ANSWER, Message(Role.USER, "Why?")),
)


Probe = tuple[Sequence[Message], Sequence[ToolSpec]]
Expected = tuple[Probe, list[int]]


@dataclass(frozen=True, slots=True)
class Choice:
    """A renderer, and in words where it comes from and why."""

    renderer: Renderer
    source: str


def choose_renderer(tokenizer: FastTokenizer, config: ChatConfig, model: Path | None) -> Choice:
    """The renderer that a configuration asks for, or for ``auto`` the one that fits the folder.

    First a hand-written renderer, if it gives the very ids that the folder's own chat template gives on
    probe conversations with a system message, tools, calls, results and reasoning; then the template
    itself; then, for a ChatML tokenizer, ChatML with tools as text.

    Raises:
        ConfigError: the renderer does not fit the tokenizer, or none does; says what to choose.
    """
    template = ChatTemplate.load(model) if model is not None else None
    if config.renderer == "template" and template is None:
        raise ConfigError(f"chat.renderer 'template': {tokenizer.name_or_path} has no chat template")
    if config.renderer not in ("auto", "template"):
        renderer = _create(tokenizer, config.renderer, config.options, config.history)
        return Choice(renderer, f"renderer '{config.renderer}', as configured")
    if template is None:
        return _without_template(tokenizer, config)
    if config.renderer == "auto" and (written := _hand_written(tokenizer, template, config)):
        return written
    ends = end_token_ids(model, tokenizer) if model is not None else []
    renderer = TemplateRenderer(tokenizer, template, config.options, ends, config.history == "exact")
    try:
        renderer.render_ids(message_dicts([_QUESTION], tokenizer.quoting), add_generation_prompt=True)
    except TemplateRefusedError as error:
        raise ConfigError(
            f"the chat template in {template.file} of {tokenizer.name_or_path} refuses a single user message: {error}; "
            f"choose chat.renderer, such as '{CHATML}' for a model with ChatML tokens"
        ) from error
    if not renderer.get_stop_token_ids():
        raise ConfigError(
            f"neither the chat template in {template.file} of {tokenizer.name_or_path} nor generation_config.json says "
            "which token ends a reply; name it there as eos_token_id"
        )
    if config.renderer == "auto" and (plain := _chatml_like(tokenizer, template, config, renderer.shows_tools)):
        return plain
    return Choice(renderer, f"the model's own template in {template.file}")


def end_token_ids(model: Path, tokenizer: FastTokenizer) -> list[int]:
    """Ids that the model's files call the end of a reply: generation settings first, else configuration, tokenizer."""
    for values in (read_json(model / "generation_config.json"), read_json(model / "config.json")):
        ends = values.get("eos_token_id")
        if ends is not None:
            return [int(end) for end in (ends if isinstance(ends, list) else [ends])]
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _without_template(tokenizer: FastTokenizer, config: ChatConfig) -> Choice:
    if None not in tokenizer.convert_tokens_to_ids(list(_CHATML_TOKENS)):
        renderer = _create(tokenizer, CHATML, config.options, config.history)
        return Choice(renderer, "ChatML with tools as text: the folder has ChatML tokens and no chat template")
    raise ConfigError(
        f"chat.renderer 'auto': {tokenizer.name_or_path} has no chat template and no ChatML tokens; put the "
        "chat_template.jinja that the model was trained with beside it, or name a renderer of the renderers package "
        "or 'module:Class' of your own"
    )


def _hand_written(tokenizer: FastTokenizer, template: ChatTemplate, config: ChatConfig) -> Choice | None:
    """The first renderer of the renderers package that says on all probes what the template says."""
    expected = list(_rendered_by(tokenizer, template, config.options))
    for name in _candidate_names(tokenizer):
        for options in _variants(config.options):
            renderer = _create_if_same(tokenizer, name, options, config.history, expected)
            if renderer is not None:
                return Choice(renderer, f"renderer '{name}': it gives what the template in {template.file} gives")
    return None


def _create_if_same(
    tokenizer: FastTokenizer, name: str, options: Mapping[str, Any], history: str, expected: Sequence[Expected]
) -> Renderer | None:
    try:
        renderer = _create(tokenizer, name, options, history)
        is_same = all(_render(renderer, tokenizer, *probe) == ids for probe, ids in expected)
    except Exception:  # noqa: BLE001 - what a renderer of another model does with this one is its own affair
        return None
    return renderer if is_same and expected else None


def _chatml_like(
    tokenizer: FastTokenizer, template: ChatTemplate, config: ChatConfig, has_tools: bool
) -> Choice | None:
    """ChatML with tools as text, if that is the template as far as it goes: most such templates know no tools."""
    if None in tokenizer.convert_tokens_to_ids(list(_CHATML_TOKENS)):
        return None
    rendered = _rendered_by(tokenizer, template, config.options)
    probes = [(probe, ids) for probe, ids in rendered if has_tools or not probe[1]]
    alone = template.render([{"role": "user", "content": "probe"}], None, False, config.options)
    system = alone.partition("<|im_start|>system\n")[2].partition("<|im_end|>")[0]
    options = {**({"system": system} if system else {}), **config.options}
    renderer = _create_if_same(tokenizer, CHATML, options, config.history, probes)
    if renderer is None:
        return None
    reason = "says the same" if has_tools else "is ChatML without tools"
    return Choice(renderer, f"ChatML with tools as text: the template in {template.file} {reason}")


def _rendered_by(tokenizer: FastTokenizer, template: ChatTemplate, options: Mapping[str, Any]) -> Iterator[Expected]:
    """What the template makes of the probes, those left out that it refuses."""
    speaker = TemplateRenderer(tokenizer, template, options, [])
    probes: list[Probe] = [(talk, ()) for talk in _PLAIN] + [(talk, _PROBE_TOOLS) for talk in _WITH_TOOLS]
    for probe in probes:
        with suppress(TemplateRefusedError):
            yield probe, _render(speaker, tokenizer, *probe)


def _render(
    renderer: Renderer, tokenizer: FastTokenizer, talk: Sequence[Message], tools: Sequence[ToolSpec]
) -> list[int]:
    quoting = tokenizer.quoting
    return renderer.render_ids(
        message_dicts(talk, quoting), tools=tool_dicts(tools, quoting), add_generation_prompt=True
    )


def _create(tokenizer: FastTokenizer, name: str, options: Mapping[str, Any], history: str) -> Renderer:
    values = dict(options)
    if history == "exact":
        values.setdefault("thinking_retention", "all")
    values["name"] = name
    if ":" in name:
        values |= {"name": "custom", "import_path": name.replace(":", ".")}
    known = _names()
    if values["name"] not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(known)}, and module:Class"
        raise ConfigError(f"chat.renderer: no renderer '{name}'; {hint}")
    try:
        return create_renderer(tokenizer, TypeAdapter(RendererConfig).validate_python(values))
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"chat.renderer '{name}' does not take chat.options: {faults}") from error
    except _UNFIT as error:
        raise ConfigError(f"chat.renderer '{name}' does not fit {tokenizer.name_or_path}: {error}") from error


def _names() -> list[str]:
    """Names of the renderers of the renderers package."""
    return [config.model_fields["name"].default for config in get_args(get_args(RendererConfig)[0])]


def _candidate_names(tokenizer: FastTokenizer) -> Iterator[str]:
    for name in _names():
        needed = _NEEDED_TOKENS.get(name)
        if name not in _NOT_CANDIDATES and (needed is None or tokenizer.convert_tokens_to_ids(needed) is not None):
            yield name


def _variants(options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The options as they are, then with either default of thinking, which models of one family differ in."""
    yield dict(options)
    if "enable_thinking" not in options:
        yield {**options, "enable_thinking": True}
        yield {**options, "enable_thinking": False}
