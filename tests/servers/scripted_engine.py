"""The embedded engine with a script in the place of its draws: ``python -m tests.servers.scripted_engine``.

Everything else is the engine's own: its weights, pauses, aborts and version labels. What a prompt asks for stands in
its last directive, such as ``[left 2 spawn]``: so many replies with tool calls are to come, and one of them may start
sub-agents. Each reply has a word of its own, made of the seed and the prompt. Whatever is answered is written to a
file, a line each. A prompt without a directive is drawn for by the model, unless whoever asks has put the reply into a
folder, under the name of the prompt. Of long prompts the model may be given the end alone, since what it draws does not
count.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from tokenizers import Tokenizer

from agentrl.cli.main import app
from agentrl.engine.generation import GenerationService
from agentrl.engine.request import Request
from agentrl.engine.sampler import Draw
from agentrl.engine.steps import StepPlanner

_DIRECTIVE = re.compile(r"\[left (\d+)( spawn)?\]")
_BEGIN = "<|im_start|>assistant\n"
_END = "<|im_end|>"
_FILLER = "select from where count name schema query user is the ".split()


def reply_text(prompt: str, seed: int) -> str | None:
    """What the policy says to a prompt; None without a directive."""
    found = _DIRECTIVE.findall(prompt)
    if not found:
        return None
    digest = hashlib.blake2b(f"{seed}/{prompt}".encode(), digest_size=8).digest()
    word, choices = digest[:4].hex(), int.from_bytes(digest[4:], "little")
    left, may_spawn = int(found[-1][0]), bool(found[-1][1])
    filler = " ".join(_FILLER[(choices + 7 * n) % len(_FILLER)] for n in range(20 + choices % 40))
    text = f"I say {word}: {filler}."
    if choices % 5 == 0:
        text = f"<think>\nI think.\n</think>\n\n{text}"
    elif choices % 5 == 1:
        text = f"\n\n  {text}  "
    if left:
        text += "".join(_calls(word, choices // 5, may_spawn))
    return text + _END


def _calls(word: str, choices: int, may_spawn: bool) -> list[str]:
    """Calls in several ways to write JSON, which are alike once they are read; one in twelve cannot be read."""
    if may_spawn and choices % 3 == 0:
        return ['\n<tool_call>\n{"name": "spawn", "arguments": {"number": 2}}\n</tool_call>']
    ways = (
        f'{{"name": "query", "arguments": {{"sql": "count {word} é"}}}}',
        f'{{"name": "query",  "arguments":  {{"sql":   "count {word} \\u00e9"}} }}',
        f'{{"arguments": {{"sql": "count {word}", "limit": 1.50}}, "name": "query"}}',
    )
    texts = [f"\n<tool_call>\n{ways[(choices + n) % 3]}\n</tool_call>" for n in range(1 + choices % 2)]
    return ['\n<tool_call>\n{"name": "query", "arguments": {"sql": }}\n</tool_call>'] if choices % 12 == 5 else texts


def prompt_name(ids: Sequence[int]) -> str:
    """The name of the file with the reply to a prompt, as a JSON list of ids."""
    return hashlib.blake2b(np.asarray(ids, np.int32).tobytes(), digest_size=16).hexdigest()


class Scripts:
    """The replies to requests in the making, as token ids."""

    def __init__(self, tokenizer: Tokenizer, folder: Path | None = None) -> None:
        self._tokenizer, self._folder = tokenizer, folder
        self._begin = tokenizer.encode(_BEGIN, add_special_tokens=False).ids
        self._known: dict[str, list[int]] = {}
        self.whole: dict[str, list[int]] = {}
        """Prompts by the ids of requests, where the engine has the end alone."""

    def next_token(self, request: Request) -> int | None:
        """What comes behind a request's context; None where the model is to draw."""
        if request.rid not in self._known:
            self._known[request.rid] = self._rest(request)
        rest = self._known[request.rid]
        return rest[len(request.output_ids)] if len(request.output_ids) < len(rest) else None

    def forget(self, rid: str) -> None:
        self._known.pop(rid, None)
        self.whole.pop(rid, None)

    def _rest(self, request: Request) -> list[int]:
        """What is left of the reply: the prompt may end with its beginning, after an abort."""
        ids = self.whole.get(request.rid, request.prompt_ids)
        start = _last(ids, self._begin)
        if start is None:
            return []
        if self._folder is not None and (given := self._folder / prompt_name(ids[:start])).is_file():
            return json.loads(given.read_text())[len(ids) - start :]
        prompt = self._tokenizer.decode(ids[:start], skip_special_tokens=False)
        text = reply_text(prompt, request.params.seed)
        if text is None:
            return []
        return self._tokenizer.encode(text, add_special_tokens=False).ids[len(ids) - start :]


def _last(ids: list[int], wanted: list[int]) -> int | None:
    """Where the last occurrence ends."""
    size = len(wanted)
    return next((n + size for n in range(len(ids) - size, -1, -1) if ids[n : n + size] == wanted), None)


def install(scripts: Scripts, record: IO[str], window: int) -> None:
    """Put the script in the place of draws, and write down what is answered; the model reads the last tokens alone."""
    append, generate = StepPlanner._append, GenerationService.generate

    def append_scripted(self: StepPlanner, slots: np.ndarray, drawn: Draw) -> None:
        given = [scripts.next_token(self.running[slot]) for slot in slots.tolist()]
        tokens = [ours if ours is not None else theirs for ours, theirs in zip(given, drawn.tokens, strict=True)]
        append(self, slots, dataclasses.replace(drawn, tokens=tokens))

    async def generate_recorded(self: GenerationService, body: dict[str, Any], hangup: Any) -> Any:
        ids = scripts.whole[body["rid"]] = body["input_ids"]
        answer = await generate(self, body | {"input_ids": ids[-window:]}, hangup)
        if len(ids) > window:
            answer["meta_info"]["prompt_tokens"] = len(ids)
            del answer["meta_info"]["request_hash"]  # it is of what the engine was given
        scripts.forget(body["rid"])
        line = {"rid": body["rid"], "seed": body["sampling_params"].get("sampling_seed"), "prompt": body["input_ids"]}
        record.write(json.dumps(line | {"answer": answer}) + "\n")
        record.flush()
        return answer

    StepPlanner._append = append_scripted  # type: ignore[method-assign]
    GenerationService.generate = generate_recorded  # type: ignore[method-assign]


def main() -> None:
    """Serve, by the options that SGLang is started with and those of the script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--deliveries", required=True)
    parser.add_argument("--replies", type=Path)
    parser.add_argument("--window", type=int, default=1 << 30)
    given, options = parser.parse_known_args()
    with Path(given.deliveries).open("a", encoding="utf-8") as record:
        tokenizer = Tokenizer.from_file(str(Path(given.model_path) / "tokenizer.json"))
        install(Scripts(tokenizer, given.replies), record, given.window)
        sys.argv[1:] = ["engine", given.model_path, "--supervised", *options]
        app()


if __name__ == "__main__":
    main()
