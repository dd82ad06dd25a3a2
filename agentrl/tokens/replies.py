"""The ids with which a policy would have said a message, behind the prompt that it is given."""

from __future__ import annotations

from collections.abc import Sequence

from renderers import Renderer

from agentrl.tokens.plain_forms import message_dicts, tool_dicts
from agentrl.tokens.template_renderer import REASONING_MARKERS
from agentrl.tokens.tokenizer import FastTokenizer
from agentrl.types.errors import ConfigError
from agentrl.types.message import Message, Role, ToolSpec

_QUESTION = Message(Role.USER, "Go on.")
_AFTER_REASONING = "\n\n"


def reply_ids(renderer: Renderer, tokenizer: FastTokenizer, message: Message) -> list[int]:
    """Ids of a reply, its stop token included, without what the generation prompt has of it already.

    A generation prompt may open the reasoning (``<think>\\n``), or open and close it; the whole
    conversation then has the rest of the block, or another one. Behind a prompt that opens it, a message
    without reasoning begins by closing it.

    Raises:
        ConfigError: the message reasons, but the prompt has closed the reasoning.
    """
    return _Speaker(renderer, tokenizer).say(message)


class _Speaker:
    """Says one message by one renderer."""

    def __init__(self, renderer: Renderer, tokenizer: FastTokenizer) -> None:
        self._renderer, self._tokenizer = renderer, tokenizer
        self._stops = set(renderer.get_stop_token_ids())

    def say(self, message: Message) -> list[int]:
        """Ids of the message."""
        result = Message(Role.TOOL, "", tool_call_id=message.tool_calls[0].id) if message.tool_calls else None
        ids = self._said(message, [result or _QUESTION])
        if message.reasoning is not None and result is None:
            # Templates drop the reasoning of replies before a user's message; at the end they may leave the stop off.
            last = self._said(message, [])
            ids = last if last and last[-1] in self._stops else [*last, *ids[-1:]]
        return ids

    def _said(self, message: Message, behind: list[Message]) -> list[int]:
        quoting = self._tokenizer.quoting
        dicts = message_dicts([_QUESTION, message, *behind], quoting)
        # Some folders have a template of its own for conversations with tools.
        tools = tool_dicts([ToolSpec(call.name, "") for call in message.tool_calls], quoting)
        opening = self._renderer.render_ids(dicts[:1], tools=tools, add_generation_prompt=True)
        rendered = self._renderer.render(dicts, tools=tools)
        ids = list(rendered.token_ids)
        if rendered.sampled_mask:
            entries = enumerate(zip(rendered.message_indices, rendered.sampled_mask, strict=True))
            ids = ids[: 1 + max((n for n, (owner, is_sampled) in entries if owner == 1 and is_sampled), default=-1)]
        kept = _common_prefix(opening, ids)
        rest = self._behind(opening[kept:], ids[kept:], opening, message)
        end = next((n for n, token in enumerate(rest) if token in self._stops), len(rest) - 1)
        return rest if rendered.sampled_mask else rest[: end + 1]

    def _behind(self, left: Sequence[int], rest: list[int], opening: Sequence[int], message: Message) -> list[int]:
        """`rest` of the whole conversation as it goes on behind a prompt of which `left` is not part of it."""
        if not left:
            return rest
        text = self._tokenizer.decode(left)
        for size in range(1, len(rest) + 1):
            begun = self._tokenizer.decode(rest[:size])
            if begun.startswith(text):
                return [*self._tokenizer.encode(begun[len(text) :]), *rest[size:]]
            if not text.startswith(begun):
                break
        if not text.strip():
            return rest
        prompt = self._tokenizer.decode(opening).rstrip()
        for start, close in REASONING_MARKERS:
            if prompt.endswith(start) and self._tokenizer.decode(rest).lstrip().startswith(close):
                return rest
            if prompt.endswith(start):
                reasoning = self._tokenizer.encode(self._tokenizer.quoting.quote(message.reasoning or ""))
                return [*reasoning, *self._tokenizer.encode(f"\n{close}{_AFTER_REASONING}"), *rest]
            if prompt.endswith(close) and message.reasoning is None:
                return rest
        raise ConfigError(
            f"the chat format of {self._tokenizer.name_or_path} cannot say this message behind its generation prompt, "
            f"which ends in {prompt[-40:]!r}; let it reason (chat.options.enable_thinking = true), or give the "
            "expert's messages no reasoning"
        )


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
