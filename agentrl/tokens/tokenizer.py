"""A tokenizer without transformers: what chat renderers need, over the `tokenizers` library."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from agentrl.types.errors import ConfigError

_CACHED_TEXTS = 16_384


class FastTokenizer:
    """Adapter that renderers take for a Hugging Face tokenizer.

    Repeated texts (template pieces, tool names) are encoded once. With `splits_control_tokens` text
    that spells a control token, such as ``<|im_end|>`` in a tool's output, is encoded as the plain text
    it is and cannot end a turn.
    """

    def __init__(self, tokenizer: Tokenizer, name_or_path: str, eos_token_id: int | None = None) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = name_or_path
        self.eos_token_id = eos_token_id
        self.unk_token_id: int | None = None
        self._encode = lru_cache(maxsize=_CACHED_TEXTS)(self._encode_uncached)

    @classmethod
    def load(cls, model: Path) -> FastTokenizer:
        """Read ``tokenizer.json`` of a model folder. Raises ConfigError if there is none."""
        file = model / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"no tokenizer.json in model folder {model}; save the tokenizer beside the weights")
        settings_file = model / "tokenizer_config.json"
        settings = json.loads(settings_file.read_text()) if settings_file.is_file() else {}
        tokenizer = Tokenizer.from_file(str(file))
        eos = settings.get("eos_token")
        eos = eos.get("content") if isinstance(eos, dict) else eos
        name = settings.get("name_or_path") or str(model)
        return cls(tokenizer, name, tokenizer.token_to_id(eos) if eos else None)

    @property
    def splits_control_tokens(self) -> bool:
        """Whether control tokens spelled out in text are encoded as plain text."""
        return self._tokenizer.encode_special_tokens

    @splits_control_tokens.setter
    def splits_control_tokens(self, value: bool) -> None:
        self._tokenizer.encode_special_tokens = value
        self._encode.cache_clear()

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._tokenizer.get_vocab_size()

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
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
