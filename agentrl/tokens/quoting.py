"""Text that is only quoted: control tokens which it spells are encoded as the plain text that they are.

Renderers and templates put text of users, tools and environments between control tokens of their own and
hand it all to the tokenizer as one string. So that the tokenizer can tell them apart, foreign text is
quoted beforehand: a noncharacter behind the first letter of whatever would become a control token.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

QUOTE = "\ufdd0"
"""A Unicode noncharacter, meant for use inside of programs; text that has it all the same gets it doubled."""

_TAG = re.compile(r"[<\[◁【]\S+[>\]▷】]")
_HTML = re.compile(
    r"</?(a|b|blockquote|br|caption|code|div|em|h[1-6]|hr|i|img|li|ol|p|pre|s|span|strong|sub|sup|table|tbody|td|tfoot"
    r"|th|thead|tr|u|ul)/?>"
)
_ANY_QUOTE = re.compile(f"{QUOTE}({QUOTE}?)")


def is_marker(text: str) -> bool:
    """Whether an added token that its tokenizer does not call special has a meaning for chat templates.

    Markers are written as tags (``<tool_call>``, ``[INST]``); runs of spaces and HTML tags, which some
    tokenizers add as well, are ordinary text.

    Example: ``is_marker("<think>")`` is true, ``is_marker("<h1>")`` and ``is_marker("    ")`` are not.
    """
    return _TAG.fullmatch(text) is not None and _HTML.fullmatch(text) is None


class Quoting:
    """Quotes text against a set of control tokens.

    Example: against ``<think>``, ``quote("a <think> b")`` puts `QUOTE` between ``<`` and ``think>``, and
    ``unquote`` gives the text back as it was.
    """

    def __init__(self, control_tokens: Iterable[str]) -> None:
        rests: dict[str, list[str]] = defaultdict(list)
        for token in control_tokens:
            if len(token) > 1:
                rests[token[0]].append(re.escape(token[1:]))
        starts = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in sorted(rests.items())]
        self._start = re.compile("|".join(starts)) if starts else None

    def quote(self, text: str) -> str:
        """The text, with no control token left in it; occurrences that overlap are all broken up."""
        text = text.replace(QUOTE, QUOTE + QUOTE)
        return text if self._start is None else self._start.sub(rf"\g<0>{QUOTE}", text)

    def quote_all(self, value: Any) -> Any:
        """A plain value, such as a tool's schema, with every text in it quoted."""
        if isinstance(value, str):
            return self.quote(value)
        if isinstance(value, Mapping):
            return {self.quote_all(key): self.quote_all(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.quote_all(entry) for entry in value]
        return value


def unquote(text: str) -> str:
    """The text as it was before it was quoted."""
    return _ANY_QUOTE.sub(r"\1", text)
