"""Speaks by a model's own chat template, so that a conversation only ever grows at its end."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from renderers import ParsedResponse, ParsedToolCall, RenderedTokens

from agentrl.tokens.calls import CALL_FORMATS, CallFormat, schemas_of
from agentrl.tokens.template import ChatTemplate, TemplateRefusedError
from agentrl.tokens.tokenizer import FastTokenizer

REASONING_MARKERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"))
_REPLY = "agentrl3b1f9c52reply"
_QUESTION = {"role": "user", "content": "Go on."}
_PROMPT_END_TOKENS = 32
_CALL_ID_LENGTH = 9
_PROBE_NAME = "measure_depth"
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": _PROBE_NAME, "description": "", "parameters": {"type": "object", "properties": {}}},
}
_PROBE_ARGUMENTS = {"text": "to be, or", "count": 3, "options": {"deep": True}}


class TemplateRenderer:
    """A renderer made of a chat template, whatever the template does.

    A template renders whole conversations, and many change what was said before when something comes
    after it. So what stands between a reply and the next is rendered behind a short conversation that
    ends in a stand-in for the reply, and only what follows the stand-in is taken: replies stay as they
    were sampled, and a turn costs what its messages cost.

    Example: for ChatML a tool's result after a reply gives ``\\n<|im_start|>tool\\n...<|im_end|>\\n`` and the
    start of the next reply.
    """

    is_prefix_stable = False

    def __init__(
        self,
        tokenizer: FastTokenizer,
        template: ChatTemplate,
        options: Mapping[str, Any],
        end_token_ids: Sequence[int],
        is_exact: bool = True,
    ) -> None:
        self._tokenizer, self._template, self._options = tokenizer, template, dict(options)
        self._is_exact = is_exact
        self._has_text_arguments = self._has_short_ids = False
        self._ends = list(end_token_ids)
        self.turn_end = self._first_after_reply([_QUESTION], tokenizer.control_token_ids)
        if self.turn_end is not None and self.turn_end not in self._ends:
            self._ends.insert(0, self.turn_end)
        result = {"role": "tool", "content": "ok", "tool_call_id": "call-0"}
        # GLM ends a reply with the beginning of the next turn, which tells who speaks then.
        self._ends_name_the_next = self._first_after_reply([result], self._ends) not in (None, self.turn_end)
        self._find_taken_forms()
        self.call_format = self._find_call_format()

    def render_text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, add_generation_prompt: bool
    ) -> str:
        """Text of a conversation. Raises TemplateRefusedError."""
        taken = [self._for_template(message) for message in messages]
        return self._template.render(taken, tools, add_generation_prompt, self._options)

    @property
    def shows_tools(self) -> bool:
        """Whether the template puts tools into the prompt."""
        try:
            text = self.render_text([_QUESTION], [_PROBE_TOOL], add_generation_prompt=True)
        except TemplateRefusedError:
            return False
        return _PROBE_NAME in text

    def render_ids(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Token ids of a conversation. Raises TemplateRefusedError."""
        return self._tokenizer.encode(self.render_text(messages, tools, add_generation_prompt))

    def render(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """Token ids of a conversation; whose they are, a template does not say."""
        ids = self.render_ids(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        return RenderedTokens(token_ids=ids)

    def get_stop_token_ids(self) -> list[int]:
        """What the template puts behind a reply, and what the model's files call its end."""
        return self._ends

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """Reasoning, content and every attempt at a call."""
        end = next((n for n, token in enumerate(token_ids) if token in self._ends), len(token_ids))
        text = self._tokenizer.decode(token_ids[:end])
        prompt = self._tokenizer.decode((prompt_ids or [])[-_PROMPT_END_TOKENS:]).rstrip()
        reasoning, is_complete, text = _split_reasoning(text, prompt)
        calls: list[ParsedToolCall] = []
        if self.call_format is not None:
            text, calls = self.call_format.read(text, schemas_of(tools))
        return ParsedResponse(text.strip(), reasoning, calls, is_complete)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens | None:
        """Prompt and reply as they are, then new messages up to the next reply; None where that cannot be."""
        roles = [message["role"] for message in new_messages]
        if not roles or "assistant" in roles or (not self._is_exact and "user" in roles):
            return None
        # A reply that ended with the beginning of another's turn: what stands before that turn has no place.
        if roles[0] == "system" and self._ends_name_the_next:
            return None
        reply = list(previous_completion_ids)
        parsed = self.parse_response(reply, tools=tools, prompt_ids=previous_prompt_ids)
        added = self._after_reply([call.name or "" for call in parsed.tool_calls], new_messages, tools)
        start = next((n for n, token in enumerate(added) if token in self._ends), None)
        if start is None:
            return None
        close: list[int] = []
        if not reply or reply[-1] not in self._ends:
            close = [*self._reasoning_close(parsed, previous_prompt_ids), added[start]]
        elif reply[-1] != added[start] and self._ends_name_the_next:
            close = [added[start]]
        return RenderedTokens(token_ids=[*previous_prompt_ids, *reply, *close, *added[start + 1 :]])

    def _after_reply(self, call_names: Sequence[str], new_messages: list[Any], tools: list[Any] | None) -> list[int]:
        """Ids that the template puts between the last words of a reply and the beginning of the next."""
        results = [message for message in new_messages if message["role"] == "tool"]
        names = [*call_names, *[call_names[-1] if call_names else "tool"] * len(results)][: len(results)]
        ids = [message.get("tool_call_id") or f"functions.tool:{n}" for n, message in enumerate(results)]
        calls = [_call(name, {"text": _REPLY}, call_id) for name, call_id in zip(names, ids, strict=True)]
        new = [dict(message) for message in new_messages]
        for message, name, call_id in zip((m for m in new if m["role"] == "tool"), names, ids, strict=True):
            message |= {"name": name, "tool_call_id": call_id}
        try:
            text = self._render_behind(calls, new, tools)
        except TemplateRefusedError:
            if len(calls) < 2:
                raise
            text = self._render_behind(calls[:1], new, tools)
        before_and_after = text.split(_REPLY, len(calls) or 1)
        return self._tokenizer.encode(before_and_after[-1]) if len(before_and_after) > 1 else []

    def _render_behind(self, calls: list[Any], new_messages: list[Any], tools: list[Any] | None) -> str:
        stand_in: dict[str, Any] = {"role": "assistant", "content": "" if calls else _REPLY}
        if calls:
            stand_in["tool_calls"] = calls
        return self.render_text([_QUESTION, stand_in, *new_messages], tools, add_generation_prompt=True)

    def _first_after_reply(self, new_messages: list[Any], wanted: Collection[int]) -> int | None:
        """The first of some tokens that the template puts behind a reply's words."""
        try:
            has_results = any(message["role"] == "tool" for message in new_messages)
            after = self._after_reply([], new_messages, [_PROBE_TOOL] if has_results else None)
        except TemplateRefusedError:
            return None
        return next((token for token in after if token in wanted), None)

    def _find_taken_forms(self) -> None:
        """Whether calls must have ids of nine letters and digits (Mistral), or arguments as JSON text (DeepSeek)."""
        forms = ((False, False), (True, False), (False, True), (True, True))
        for self._has_short_ids, self._has_text_arguments in forms:
            if self._takes_calls():
                return
        self._has_short_ids = self._has_text_arguments = False

    def _takes_calls(self) -> bool:
        text = self._probe_call()
        return text is not None and "{'text'" not in text

    def _probe_call(self) -> str | None:
        """Text of a conversation with a call and its result; None if the template refuses it."""
        call = {"role": "assistant", "content": "", "tool_calls": [_call(_PROBE_NAME, _PROBE_ARGUMENTS, "call-0")]}
        result = {"role": "tool", "content": "ok", "tool_call_id": "call-0", "name": _PROBE_NAME}
        try:
            return self.render_text([_QUESTION, call, result], [_PROBE_TOOL], add_generation_prompt=False)
        except TemplateRefusedError:
            return None

    def _find_call_format(self) -> CallFormat | None:
        """The format in which the template writes a call, found by reading one back."""
        text = self._probe_call()
        if text is None:
            return None
        ends = "|".join(re.escape(self._tokenizer.decode(token)) for token in self._ends)
        pieces = re.split(ends, text) if ends else [text]
        # What stands before a call need not be part of the reply: the beginning of the turn is not.
        pieces += [piece[piece.find("{") :] for piece in pieces if "{" in piece]
        return next((known for known in CALL_FORMATS if any(_reads_probe(known, piece) for piece in pieces)), None)

    def _for_template(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message under all names that templates know its parts by, its ids of a form that all of them take."""
        entry = dict(message)
        if "reasoning_content" in entry:
            entry["thinking"] = entry["reasoning_content"]
        if "tool_call_id" in entry:
            entry["tool_call_id"] = self._id_for_template(entry["tool_call_id"])
        if entry.get("tool_calls"):
            entry["tool_calls"] = [self._call_for_template(call) for call in entry["tool_calls"]]
        return entry

    def _call_for_template(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        if self._has_text_arguments:
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "id": self._id_for_template(call["id"]), "function": function}

    def _id_for_template(self, call_id: str) -> str:
        return _short_id(call_id) if self._has_short_ids else call_id

    def _reasoning_close(self, parsed: ParsedResponse, prompt: list[int]) -> list[int]:
        if parsed.reasoning_complete is not False:
            return []
        return self._tokenizer.encode(REASONING_MARKERS[0][1])


def _reads_probe(call_format: CallFormat, text: str) -> bool:
    found = call_format.read(text, {})[1]
    return [(call.name, call.arguments) for call in found] == [(_PROBE_NAME, _PROBE_ARGUMENTS)]


def _split_reasoning(text: str, prompt: str) -> tuple[str | None, bool, str]:
    """Reasoning, whether it is closed, and what comes after it; `prompt` is what the reply stands behind."""
    for opening, close in REASONING_MARKERS:
        if not prompt.endswith(opening) and not text.lstrip().startswith(opening):
            continue
        reasoning, mark, rest = text.lstrip().removeprefix(opening).partition(close)
        if not mark and "<tool_call>" in reasoning:
            reasoning, mark, rest = reasoning.partition("<tool_call>")
            rest = mark + rest
        return reasoning.strip("\n") or None, bool(mark), rest
    return None, True, text


def _call(name: str, arguments: Mapping[str, Any], call_id: str) -> dict[str, Any]:
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def _short_id(call_id: str) -> str:
    """The last nine letters and digits of an id.

    Example: ``functions.query:0`` becomes ``sxqueryx0``.
    """
    return re.sub(r"[^A-Za-z0-9]", "x", call_id).rjust(_CALL_ID_LENGTH, "0")[-_CALL_ID_LENGTH:]
