"""Model folders with tokenizers and chat templates made by hand, in the manner of models that people train."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from agentrl.types.message import Message, Role, ToolCall, ToolSpec

WORDS = 'the system user assistant says hello and goes on to think about \n\n newlines {"name": "x"} 0123456789\n\n\n'
QWEN_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
QWEN_TOKENS = (*CHATML_TOKENS, *QWEN_MARKERS)
GLM_TOKENS = (
    *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<tool_response>", "</tool_response>"),
)
LLAMA_TOKENS = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)
MISTRAL_TOKENS = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)

TOOLS = (
    ToolSpec(
        "query",
        "Runs one SQL statement, of 'any' \"kind\".",
        {"type": "object", "properties": {"sql": {"type": "string"}, "n": {"type": "integer"}}, "required": ["sql"]},
    ),
    ToolSpec("schema", "Looks."),
)
SYSTEM = Message(Role.SYSTEM, "Be brief.")
QUESTION = Message(Role.USER, "How many have a net_cost above 17?")
CALL = Message(Role.ASSISTANT, "", (ToolCall("e/0.0", "query", {"sql": "SELECT '<', 1", "n": 2}),))
RESULT = Message(Role.TOOL, '{"rows": [[1]]}', tool_call_id="e/0.0")
ANSWER = Message(Role.ASSISTANT, "There is 1.")
NEXT = Message(Role.USER, "Are you sure?")


def byte_level(added: Sequence[str], size: int = 600) -> Tokenizer:
    """A byte-level BPE as Qwen, GLM and Llama 3 have; only what is written with bars is special."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN_PIECES), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([WORDS] * 4, trainer)
    tokenizer.add_tokens([AddedToken(text, special=is_special(text), normalized=False) for text in added])
    return tokenizer


def sentence_piece(added: Sequence[str]) -> Tokenizer:
    """A BPE in SentencePiece's manner, as Llama 2 and Mistral have: spaces are letters, unknown ones are bytes."""
    base = {f"<0x{n:02X}>": n for n in range(256)}
    letters = sorted({*WORDS.replace(" ", "▁"), *"abcdefghijklmnopqrstuvwxyz<>/_[]|"})
    vocabulary = {**base, **{letter: 256 + n for n, letter in enumerate(letters)}}
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("▁", "a"), ("l", "l")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_tokens([AddedToken(text, special=is_special(text), normalized=False) for text in added])
    return tokenizer


def unicode_normal(added: Sequence[str]) -> Tokenizer:
    """As `byte_level`, with the normalizer that Qwen has."""
    tokenizer = byte_level(added)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def is_special(text: str) -> bool:
    """As the makers of these models have it."""
    return "|" in text or text in ("[gMASK]", "<sop>", "<s>", "</s>")


def write_folder(
    folder: Path, tokenizer: Tokenizer, template: str | None, eos: str, bos: str | None = None, **more: Any
) -> Path:
    """A model folder without weights; `more` are ids of ``generation_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "clean_up_tokenization_spaces": False}
    if bos is not None:
        settings["bos_token"] = bos
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if more:
        (folder / "generation_config.json").write_text(json.dumps(more))
    return folder


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as a user of transformers writes them."""
    return [_plain(message) for message in messages]


def plain_tools(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Tools as a user of transformers writes them."""
    return [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in tools
    ]


def as_transformers_does(
    folder: Path, messages: Sequence[Message], tools: Sequence[ToolSpec], has_prompt: bool = True, **options: Any
) -> list[int]:
    """Ids of a conversation by the folder's template and tokenizer, through transformers alone."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    talk, listed = plain_messages(messages), plain_tools(tools) or None
    return tokenizer.apply_chat_template(
        talk, tools=listed, add_generation_prompt=has_prompt, return_dict=False, **options
    )


def _plain(message: Message) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": str(message.role), "content": message.content}
    if message.tool_calls:
        entry["tool_calls"] = [
            {"type": "function", "id": "sxqueryx0", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.tool_calls
        ]
    if message.role is Role.TOOL:
        entry |= {"tool_call_id": "sxqueryx0", "name": "query"}
    if message.reasoning is not None:
        entry["reasoning_content"] = message.reasoning
    return entry
