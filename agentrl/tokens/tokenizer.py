"""A tokenizer without transformers: what chat renderers need, over the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from agentrl.tokens.quoting import QUOTE, Quoting, is_marker, unquote
from agentrl.types.errors import ConfigError

_CACHED_TEXTS = 16_384


class FastTokenizer:
    """Adapter that renderers take for a Hugging Face tokenizer.

    Repeated texts (template pieces, tool names) are encoded once. Control tokens are those that the
    tokenizer calls special, and markers such as ``<tool_call>``, which many tokenizers do not. Where a
    text spells one it becomes that token; where it spells one in a part that is quoted, it becomes
    the plain text that it is, and the rest of the text is encoded as if it stood there unquoted.
    """

    def __init__(self, tokenizer: Tokenizer, name_or_path: str, eos_token_id: int | None = None) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = name_or_path
        self.eos_token_id = eos_token_id
        self.unk_token_id: int | None = None
        added = tokenizer.get_added_tokens_decoder()
        self._control = {n: t.content for n, t in added.items() if t.special or is_marker(t.content)}
        self.quoting = Quoting(self._control.values())
        self._encode = lru_cache(maxsize=_CACHED_TEXTS)(self._encode_uncached)

    @classmethod
    def load(cls, model: Path) -> FastTokenizer:
        """Read ``tokenizer.json`` of a model folder. Raises ConfigError if there is none."""
        file = model / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"no tokenizer.json in model folder {model}; save the tokenizer beside the weights")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises nothing narrower
            raise ConfigError(f"{file} cannot be read: {error}; copy or convert the model again") from error
        eos = read_settings(model).get("eos_token")
        eos = eos.get("content") if isinstance(eos, dict) else eos
        return cls(tokenizer, str(model), tokenizer.token_to_id(eos) if eos else None)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._tokenizer.get_vocab_size()

    def vocabulary(self) -> dict[str, int]:
        """The id of each token, as the tokenizer's file spells it; added tokens included."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    @property
    def control_token_ids(self) -> frozenset[int]:
        """Ids that mean something to chat templates."""
        return frozenset(self._control)

    def encode(self, text: str, *_args: Any, **_kwargs: Any) -> list[int]:
        """Token ids of a text, without any that the tokenizer would add by itself."""
        return list(self._encode(text))

    def decode(self, token_ids: Any, *_args: Any, **_kwargs: Any) -> str:
        """Text of token ids, control tokens spelled out."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Id of a token, or ids of a list of tokens; None where there is no such token."""
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]

    def _encode_uncached(self, text: str) -> tuple[int, ...]:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids if QUOTE not in text else self._unquoted(text)
        return tuple(ids)

    def _unquoted(self, text: str) -> Iterator[int]:
        """Ids of a text with quoted parts: only what stands outside of them is meant as control tokens.

        Those are found first. Then the text goes through a tokenizer that knows no control tokens, with
        a placeholder where each of them stood: text that is quoted must not be cut into pieces, since a
        tokenizer would treat its pieces differently.
        """
        pieces: list[str] = []
        meant: list[list[int]] = []
        last = 0
        for token, start, end in self._control_tokens(text):
            self._add_piece(text[last:start], pieces, meant)
            pieces.append(QUOTE)
            meant.append([token])
            last = end
        self._add_piece(text[last:], pieces, meant)
        placeholder, tokens = self._plain.token_to_id(QUOTE), iter(meant)
        for token in self._plain.encode("".join(pieces), add_special_tokens=False).ids:
            if token == placeholder:
                yield from next(tokens)
            else:
                yield token

    def _add_piece(self, piece: str, pieces: list[str], meant: list[list[int]]) -> None:
        """A piece without control tokens; placeholders that are part of its text stand for themselves."""
        plain = unquote(piece)
        pieces.append(plain)
        meant.extend([self._tokenizer.encode(QUOTE, add_special_tokens=False).ids] * plain.count(QUOTE))

    def _control_tokens(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Control tokens outside of what is quoted: id, and where in the text they begin and end."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            # The unknown token is a control token as well, but stands for other text than its own.
            if token in self._control and self._control[token] in text[start:end]:
                yield token, start, end

    @cached_property
    def _plain(self) -> Tokenizer:
        """The same tokenizer, to which control tokens are text like any other, and `QUOTE` is a token."""
        definition = json.loads(self._tokenizer.to_str())
        for token in definition["added_tokens"]:
            token["special"] = token["id"] in self._control
        plain = Tokenizer.from_str(json.dumps(definition))
        plain.encode_special_tokens = True
        plain.add_tokens([AddedToken(QUOTE, normalized=False)])
        return plain


def read_settings(model: Path) -> dict[str, Any]:
    """``tokenizer_config.json`` of a model folder; empty without one. Raises ConfigError."""
    return read_json(model / "tokenizer_config.json")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is none. Raises ConfigError if it is something else."""
    try:
        value = json.loads(file.read_text()) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; copy or convert the model again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} holds a {type(value).__name__}, not an object; copy or convert the model again")
    return value
