"""Makes a small tokenizer on the spot, for tiny models that must copy names and numbers.

Copying is what tiny models find hardest, so the vocabulary is chosen for it: a word has one spelling
in tokens wherever it stands (spaces belong to the punctuation around words), the environment's words
are one token each, and the fixed text of the template (the tool descriptions) is a single token.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from agentrl.tokens.made_templates import QWEN3_TEMPLATE

CONTROL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
MARKER_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_PIECES = r"_?[a-z]+|[0-9]{1,2}|[^a-z0-9_]+|_"
_WORD_REPEATS = 1000
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def make_tokenizer(
    corpus: Iterable[str], words: Sequence[str], fixed_texts: Sequence[str], vocab_size: int
) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens in Qwen3's control vocabulary.

    Every entry of `words` becomes one token if the size allows it, every entry of `fixed_texts` always.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKER_TOKENS) - len(fixed_texts),
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*corpus, *[" ".join(words)] * _WORD_REPEATS], trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*MARKER_TOKENS, *fixed_texts)])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, chat_template: str | None = QWEN3_TEMPLATE) -> None:
    """Write the files that both `FastTokenizer` and transformers read."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Write tokenizer and chat template of the model in `source` to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)
