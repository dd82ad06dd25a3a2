"""Whether token ids mean the same to two models."""

from __future__ import annotations

from pathlib import Path

from agentrl.tokens.tokenizer import FastTokenizer


def vocabulary_difference(first: Path, second: Path) -> str | None:
    """Where the tokenizers of two model folders give an id another meaning, in words; None if they give none.

    How text is cut into tokens does not matter where ids are exchanged.

    Example: ``token 17 is ' cat' in models/a and ' dog' in models/b``.

    Raises:
        ConfigError: a folder has no tokenizer, or a damaged one.
    """
    if first.resolve() == second.resolve():
        return None
    meanings, others = _meanings(first), _meanings(second)
    for token in sorted(meanings.keys() | others.keys()):
        if meanings.get(token) != others.get(token):
            return f"token {token} is {_quoted(meanings, token)} in {first} and {_quoted(others, token)} in {second}"
    return None


def _meanings(folder: Path) -> dict[int, str]:
    return {token: text for text, token in FastTokenizer.load(folder).vocabulary().items()}


def _quoted(meanings: dict[int, str], token: int) -> str:
    return repr(meanings[token]) if token in meanings else "absent"
