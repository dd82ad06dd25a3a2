"""Engines in front of an engine: one that records what it delivers, and two with a protection switched off."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from agentrl.inference.client import EngineClient
from agentrl.types.generation import FinishReason, Generation, GenerationRequest
from agentrl.types.version import PolicyVersion, VersionSpan


class EngineLayer:
    """An engine in front of another one; changes nothing by itself."""

    def __init__(self, engine: EngineClient | EngineLayer) -> None:
        self.name = engine.name
        self._engine = engine

    async def generate(self, request: GenerationRequest) -> Generation:
        return await self._engine.generate(request)

    async def count_requests(self) -> int | None:
        return await self._engine.count_requests()


class RecordingEngine(EngineLayer):
    """Keeps what was delivered: token ids by session and length of the conversation, which is to say by reply."""

    def __init__(self, engine: EngineClient) -> None:
        super().__init__(engine)
        self.aborts = self.aborts_with_tokens = 0
        self.delivered: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))

    async def generate(self, request: GenerationRequest) -> Generation:
        part = await super().generate(request)
        self.delivered[request.session][len(request.conversation)] += part.token_ids.tolist()
        is_abort = part.finish is FinishReason.ABORT
        self.aborts += is_abort
        self.aborts_with_tokens += is_abort and len(part.token_ids) > 0
        return part


class ForgetfulEngine(EngineLayer):
    """The fault that the session protects from: what an aborted request had is thrown away, of every `nth`."""

    def __init__(self, engine: EngineClient | EngineLayer, nth: int = 1) -> None:
        super().__init__(engine)
        self._nth, self._aborts = nth, 0

    async def generate(self, request: GenerationRequest) -> Generation:
        part = await super().generate(request)
        if part.finish is not FinishReason.ABORT:
            return part
        self._aborts += 1
        if self._aborts % self._nth:
            return part
        return replace(part, token_ids=part.token_ids[:0], logprobs=part.logprobs[:0], versions=(), kv_versions=())


class ClockedEngine(EngineLayer):
    """The fault that the engine's spans protect from: the version that the client believed in when it asked."""

    def __init__(self, engine: EngineLayer, clock: Callable[[], PolicyVersion]) -> None:
        super().__init__(engine)
        self._clock = clock

    async def generate(self, request: GenerationRequest) -> Generation:
        believed = self._clock()
        part = await super().generate(request)
        spans = (VersionSpan(believed, 0, len(part.token_ids)),) if len(part.token_ids) else ()
        return replace(part, versions=spans, kv_versions=spans)
