"""Engines that follow a script instead of a model: for tests, benchmarks and warm starts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from agentrl.protocols import Engine
from agentrl.tokens.chat import ChatFormat
from agentrl.types.batch import Receipt
from agentrl.types.generation import FinishReason, Generation, GenerationRequest
from agentrl.types.message import Message
from agentrl.types.version import FIRST_VERSION, PolicyVersion, VersionSpan
from agentrl.types.weights import WeightGroup, WeightSource

Script = Callable[[str, Sequence[Message]], Message]


class ScriptedEngine(Engine):
    """Answers each request with the tokens of the message that a script gives for its conversation.

    In process and at once. Log-probabilities are 0: a script is certain.

    Example: ``ScriptedEngine(chat, lambda session, messages: Message(Role.ASSISTANT, "93"))``.
    """

    def __init__(self, chat: ChatFormat, script: Script, version: PolicyVersion | None = None) -> None:
        self.name = "scripted"
        self.version = version or FIRST_VERSION
        self._chat, self._script = chat, script

    @property
    def repeated_calls(self) -> Counter[str]:
        """No answer is ever lost."""
        return Counter()

    async def generate(self, request: GenerationRequest) -> Generation:
        """The scripted reply, cut where the request's budget ends."""
        message = self._script(request.session, request.conversation)
        ids = self._chat.complete(message)[: request.max_new_tokens]
        finish = FinishReason.STOP if int(ids[-1]) in request.stop_token_ids else FinishReason.LENGTH
        spans = (VersionSpan(self.version, 0, len(ids)),)
        return Generation(ids, np.zeros(len(ids), np.float32), spans, spans, finish)

    async def score(self, token_ids: Sequence[int], start: int = 1) -> list[float]:
        """Zeros: a script is certain."""
        return [0.0] * (len(token_ids) - start)

    async def pause(self) -> int:
        """Nothing is ever in flight."""
        return 0

    async def count_requests(self) -> int | None:
        """Nothing is ever in flight."""
        return 0

    async def resume(self) -> None:
        """Nothing waits."""

    async def release_memory(self) -> None:
        """Nothing is kept."""

    async def resume_memory(self) -> None:
        """Nothing is needed."""

    async def abort_all(self) -> None:
        """Nothing is ever in flight."""

    async def abort(self, rid: str) -> None:
        """Nothing is ever in flight."""

    async def stage(self, source: WeightSource, version: PolicyVersion) -> None:
        """Nothing is taken ahead."""

    async def needs_pause(self) -> bool:
        """Always."""
        return True

    async def swap(self, source: WeightSource, version: PolicyVersion) -> None:
        """Only the version changes."""
        self.version = version

    async def rename(self, version: PolicyVersion) -> None:
        """Only the version changes."""
        self.version = version

    async def receipt(self) -> Receipt:
        """The version, without checksums."""
        return Receipt(self.name, self.version, {}, 0.0, 0)

    async def ping(self) -> None:
        """Always there."""

    async def probe(self) -> PolicyVersion:
        """Always well."""
        return self.version

    async def join_group(self, group: WeightGroup) -> None:
        """Nothing is ever broadcast."""

    async def leave_group(self, name: str) -> None:
        """Nothing is ever broadcast."""

    async def load_adapter(self, path: str, version: PolicyVersion) -> None:
        """Only the version changes."""
        self.version = version


class AbortingEngine(ScriptedEngine):
    """A scripted engine that is interrupted: each request delivers what the next cut says and aborts.

    After the last cut it delivers whole replies. Every token has a log-probability of its own, by its
    position in the context alone, so a token that is lost or comes twice shows. With `moves` the
    version rises at every abort, as it does when new weights are the reason.

    Example: cuts ``[2, 0]`` give two tokens, then none, then the rest of the reply.
    """

    def __init__(self, chat: ChatFormat, script: Script, cuts: Sequence[int], moves: bool = True) -> None:
        super().__init__(chat, script)
        self._cuts, self._moves = list(cuts), moves
        self._prompts: dict[tuple[str, int], int] = {}
        self.requests: list[GenerationRequest] = []
        self.delivered: list[int] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        """What is left of the scripted reply, up to the next cut."""
        self.requests.append(request)
        start = self._prompts.setdefault((request.session, len(request.conversation)), len(request.prompt_ids))
        whole = self._chat.complete(self._script(request.session, request.conversation))
        rest = whole[len(request.prompt_ids) - start :][: request.max_new_tokens]
        size = min(self._cuts.pop(0), len(rest) - 1) if self._cuts else len(rest)
        finish = FinishReason.STOP if int(rest[-1]) in request.stop_token_ids else FinishReason.LENGTH
        ids = rest[:size]
        self.delivered += ids.tolist()
        spans = (VersionSpan(self.version, 0, size),) if size else ()
        positions = np.arange(len(request.prompt_ids), len(request.prompt_ids) + size)
        if size < len(rest):
            finish = FinishReason.ABORT
            self.version = self.version.next() if self._moves else self.version
        return Generation(ids, (-1e-3 * positions).astype(np.float32), spans, spans, finish)


def expert_script(act: Callable[[Sequence[Message], random.Random], Message]) -> Script:
    """A script of a player that takes a random generator, seeded alike for all turns of a session."""

    def script(session: str, messages: Sequence[Message]) -> Message:
        return act(messages, random.Random(session))

    return script
