"""An engine that writes down what it is told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import numpy as np

from agentrl.types.batch import Receipt, WeightsManifest
from agentrl.types.errors import EngineError, EpisodeError
from agentrl.types.generation import FinishReason, Generation, GenerationRequest
from agentrl.types.version import PolicyVersion, VersionSpan
from agentrl.types.weights import FolderWeights

OLD, NEW = PolicyVersion(0, 3), PolicyVersion(0, 4)
MANIFEST = WeightsManifest("main", NEW, "/staged/0.4", {"a": "11", "b": "22"}, 100)


class RecordingEngine:
    """Writes down the calls it gets; `failing` is the one that raises, all wait for the gate.

    A generation gives what is next in `draws`, else token 5 at -0.5, of version `writes` or of what it serves.
    """

    def __init__(self, name: str, failing: str | None = None) -> None:
        self.name, self.failing = name, failing
        self.calls: list[str] = []
        self.version = OLD
        self.checksums = {"a": "11", "b": "22"}
        self.scores: list[float] = []
        self.draws: list[tuple[int, float] | EpisodeError] = []
        self.drawn: list[GenerationRequest] = []
        self.writes: PolicyVersion | None = None
        self.repeated_calls: Counter[str] = Counter()
        self.gate = asyncio.Event()
        self.gate.set()

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        await self.gate.wait()
        if name == self.failing:
            raise EngineError(f"{name} broke")

    async def pause(self) -> int:
        await self._call("pause")
        return 2

    async def stage(self, source: FolderWeights, version: PolicyVersion) -> None:
        """Nothing is taken ahead."""

    async def needs_pause(self) -> bool:
        return True

    async def swap(self, source: FolderWeights, version: PolicyVersion) -> None:
        assert source == FolderWeights("/staged/0.4")
        await self._call("swap")
        self.version = version

    async def rename(self, version: PolicyVersion) -> None:
        await self._call("rename")
        self.version = version

    async def receipt(self) -> Receipt:
        await self._call("receipt")
        return Receipt(self.name, self.version, self.checksums, 0.0, 0)

    async def resume(self) -> None:
        await self._call("resume")

    async def score(self, token_ids: Sequence[int], start: int = 1) -> list[float]:
        await self._call("score")
        return self.scores

    async def generate(self, request: GenerationRequest) -> Generation:
        await self._call("generate")
        answer = self.draws.pop(0) if self.draws else (5, -0.5)
        if isinstance(answer, EpisodeError):
            raise answer
        token, logprob = answer
        spans = (VersionSpan(self.writes or self.version, 0, 1),)
        ids, logprobs = np.asarray([token], np.int32), np.asarray([logprob], np.float32)
        self.drawn.append(request)
        return Generation(ids, logprobs, spans, spans, FinishReason.LENGTH)

    async def ping(self) -> None:
        await self._call("ping")

    async def probe(self) -> PolicyVersion:
        await self._call("probe")
        return self.version

    async def abort_all(self) -> None:
        await self._call("abort_all")
