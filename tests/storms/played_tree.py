"""What programs asked and heard, and the branches that this must have made, rendered plainly from the beginning.

A call that goes on behind a reply stands behind the reply as it was delivered; any other is the text of the whole
conversation in Qwen's format. No code of the platform's takes part.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from tests.storms.deliveries import Faults, Graph, Reply
from tests.storms.gateway_clients import TOOLS, Entry, Heard

_WORD = re.compile(r"I say ([0-9a-f]{8})")
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_PREAMBLE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_MANNER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)
_BEGIN, _END = "<|im_start|>assistant\n", "<|im_end|>"


@dataclass(frozen=True)
class Asked:
    """One call as its program meant it, however often it was sent, and what came of it.

    A call in token ids has its whole prompt as `prompt_ids`.
    """

    number: int
    dialect: str
    entries: tuple[Entry, ...]
    heard: Heard
    prompt_ids: tuple[int, ...] = ()


class PlainFormat:
    """Qwen's chat format as text."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def conversation(self, entries: Sequence[Entry]) -> str:
        """A whole conversation, up to where a reply begins."""
        told = [{"type": "function", "function": {"name": n, "description": d, "parameters": p}} for n, d, p in TOOLS]
        system = "".join(f"{entry.text}\n\n" for entry in entries if entry.kind == "system")
        lines = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in told)
        head = f"<|im_start|>system\n{system}{_PREAMBLE}{lines}{_MANNER}{_END}\n"
        return head + self.piece([entry for entry in entries if entry.kind != "system"])

    def piece(self, entries: Sequence[Entry]) -> str:
        """Messages that are no system's, up to where a reply begins."""
        text = ""
        for n, entry in enumerate(entries):
            if entry.kind == "result":
                is_first = not n or entries[n - 1].kind != "result"
                is_last = n + 1 == len(entries) or entries[n + 1].kind != "result"
                text += "<|im_start|>user" * is_first + f"\n<tool_response>\n{entry.text}\n</tool_response>"
                text += f"{_END}\n" * is_last
            elif entry.kind == "user":
                text += f"<|im_start|>user\n{entry.text}{_END}\n"
            else:
                text += f"{_BEGIN}{_spoken(entry)}{_END}\n"
        return text + _BEGIN


class PlayedTree:
    """All calls of one episode, and what they must look like in its graph."""

    def __init__(self, form: PlainFormat) -> None:
        self._form = form
        self.asked: list[Asked] = []

    def add(self, dialect: str, entries: Sequence[Entry], heard: Heard, prompt_ids: Sequence[int] = ()) -> Entry:
        """A call that was answered; returns the reply as a part of its conversation."""
        number = len(self.asked)
        self.asked.append(Asked(number, dialect, tuple(entries), heard, tuple(prompt_ids)))
        return Entry("reply", heard.text, heard=heard, number=number)

    def check(self, graph: Graph, replies: Sequence[Reply]) -> Faults:
        """Each call has one reply, that which its program heard, where it belongs; nothing else was drawn."""
        faults = Faults()
        by_word = {word: reply for reply in replies if (word := self._word(self._form.text(reply.token_ids)))}
        wanted: Counter[tuple[bytes, bytes]] = Counter()
        wholes: dict[int, list[int]] = {}
        askers: dict[bytes, Asked] = {}
        for asked in self.asked:
            word = self._word(self._form.text(asked.heard.token_ids) if asked.prompt_ids else asked.heard.text)
            reply = by_word.get(word)
            if reply is None or not self._spells(asked, reply):
                faults.branches_wrong += 1
                faults.notes.append(f"call {asked.number} ({asked.dialect}) heard what no reply says: {asked.heard}")
                continue
            prompt = self._prompt(asked, wholes)
            wholes[asked.number] = [*prompt, *reply.token_ids]
            wanted[Reply(0, prompt).prompt, Reply(0, wholes[asked.number]).prompt] += 1
            askers.setdefault(Reply(0, prompt).prompt, asked)
        found = Counter((graph.before(node), graph.until(node)) for node in graph.sampled)
        for what, those in (("has no node", wanted - found), ("was not asked for", found - wanted)):
            faults.branches_wrong += those.total()
            for before, _ in those.elements():
                like = askers.get(before)
                whose = f", as call {like.number} ({like.dialect})" if like else ""
                faults.notes.append(f"a reply behind {len(before) // 4} tokens{whose} {what}")
        ends = [whole for _, whole in wanted if not any(before.startswith(whole) for before, _ in wanted)]
        faults.branches_wrong += (Counter(ends) - graph.leaves).total() + (graph.leaves - Counter(ends)).total()
        return faults

    def _prompt(self, asked: Asked, wholes: dict[int, list[int]]) -> list[int]:
        """The tokens that a call is to be answered behind."""
        if asked.prompt_ids:
            return list(asked.prompt_ids)
        last = max((n for n, entry in enumerate(asked.entries) if entry.kind in ("reply", "said")), default=None)
        number = asked.entries[last].number if last is not None else -1
        goes_on = number in wholes and self.asked[number].entries == asked.entries[:last]
        if not goes_on or last is None:
            return self._form.ids(self._form.conversation(asked.entries))
        text = self._form.text(wholes[number])
        # A reply that was cut short is closed.
        close = "\n" if text.endswith(_END) else f"{_END}\n"
        return [*wholes[number], *self._form.ids(close + self._form.piece(asked.entries[last + 1 :]))]

    def _spells(self, asked: Asked, reply: Reply) -> bool:
        """Whether what was heard is what the tokens say."""
        if asked.prompt_ids:
            return list(asked.heard.token_ids) == reply.token_ids
        text = self._form.text(reply.token_ids).removesuffix(_END).rpartition("</think>")[2]
        calls = [_loads(call) for call in _CALL.findall(text)]
        if None in calls:
            return True  # what cannot be read stands in the text, or as a call without arguments
        heard = [{"name": name, "arguments": arguments} for _, name, arguments in asked.heard.calls]
        return heard == calls and asked.heard.text.strip() == _CALL.sub("", text).strip()

    def _word(self, text: str) -> str | None:
        found = _WORD.search(text)
        return found.group(1) if found else None


def _spoken(entry: Entry) -> str:
    """An assistant's message as text."""
    if entry.heard is None:
        return entry.text
    calls = [json.dumps({"name": name, "arguments": given}, ensure_ascii=False) for _, name, given in entry.heard.calls]
    texts = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    return "\n".join([entry.text, *texts] if entry.text else texts)


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
