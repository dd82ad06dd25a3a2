"""A model's own chat template: Jinja, rendered as transformers renders it, without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.tokens.tokenizer import read_json, read_settings
from agentrl.types.errors import ConfigError

_FILE = "chat_template.jinja"
_MORE = "additional_chat_templates"
_TOOL_USE = "tool_use"
_TODAY = datetime(2024, 7, 26)


class TemplateRefusedError(Exception):
    """The template raised for this conversation, or does not know what it is given."""


class _GenerationTag(Extension):
    """``{% generation %}`` marks replies for others; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body, as if the tag were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A folder's chat template with the special tokens that it may name.

    `tool_use` is a second template for conversations with tools, which some folders have.

    Example: ``ChatTemplate.load(folder).render([{"role": "user", "content": "hi"}], None, True)`` gives
    ``<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n`` for a ChatML model.
    """

    source: str
    file: str
    tool_use: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, model: Path) -> ChatTemplate | None:
        """The template of a model folder, from where transformers looks for it; None if there is none.

        Raises:
            ConfigError: there is one, but it cannot be read.
        """
        settings = read_settings(model)
        found, file = _find_templates(model, settings)
        if not found:
            return None
        default = found.get("default") or next(iter(found.values()))
        template = cls(default, file, found.get(_TOOL_USE), _special_tokens(model, settings))
        for source in filter(None, (template.source, template.tool_use)):
            try:
                _compile(source)
            except TemplateError as error:
                raise ConfigError(f"the chat template in {model / file} is not valid Jinja: {error}") from error
        return template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of a conversation.

        Dates are always 26 July 2024, the date that Llama's templates have where they are not told
        another, unless an option gives one: prompts must not change from one day of a run to the next.

        Raises:
            TemplateRefusedError: the template does not take this conversation.
        """
        source = self.tool_use if tools and self.tool_use else self.source
        values = {"messages": messages, "tools": tools, "documents": None, **self.special_tokens, **(options or {})}
        try:
            return _compile(source).render(**values, add_generation_prompt=add_generation_prompt)
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
            raise TemplateRefusedError(str(error)) from error


def _find_templates(model: Path, settings: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """Templates by name, and the file that they are in."""
    more = {file.stem: file.read_text() for file in sorted((model / _MORE).glob("*.jinja"))}
    if (model / _FILE).is_file():
        return {"default": (model / _FILE).read_text(), **more}, _FILE
    for file, values in (
        ("tokenizer_config.json", settings),
        ("chat_template.json", read_json(model / "chat_template.json")),
    ):
        entry = values.get("chat_template")
        if isinstance(entry, str):
            return {"default": entry, **more}, file
        if isinstance(entry, list):
            return {named["name"]: named["template"] for named in entry} | more, file
    return {}, ""


def _special_tokens(model: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """What templates call ``bos_token``, ``eos_token`` and so on."""
    values = {**read_json(model / "special_tokens_map.json"), **settings}
    texts = {name: v.get("content") if isinstance(v, dict) else v for name, v in values.items()}
    return {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}


@lru_cache(maxsize=64)
def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: Jinja's own filter would escape what HTML must escape."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
