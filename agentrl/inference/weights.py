"""How an engine takes weights over SGLang's native protocol, beside generation where the server can do that."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import Any

from agentrl.inference.calls import EngineHttp
from agentrl.inference.config import ClientConfig
from agentrl.inference.labels import Labels
from agentrl.types.errors import EngineError, EngineRefusedError
from agentrl.types.version import PolicyVersion
from agentrl.types.weights import (
    BroadcastWeights,
    Bucket,
    FolderWeights,
    MappedWeights,
    PauseMode,
    WeightGroup,
    WeightSource,
)

_LAYOUT = "flattened_bucket"
# The embedded engine then serves nothing of the update; SGLang has served its buckets already.
_DISCARD = {"discard": True}


class WeightCalls:
    """The calls that bring weights to one engine.

    The embedded engine has ``/stage_weights``: it takes weights while it generates, and a swap only exchanges pointers,
    in place without a pause. SGLang has not, and takes them in its pause. Which it is, is asked once, and anew after a
    failure: another kind of server may have taken its place.

    Example: ``await calls.stage(source, version)``, a pause if ``calls.needs_pause``, ``await calls.swap(source,
    version)``.
    """

    def __init__(self, http: EngineHttp, labels: Labels, config: ClientConfig, mode: PauseMode) -> None:
        self._http, self._labels, self._config, self._mode = http, labels, config, mode
        self._can_stage: bool | None = None
        self._staged: PolicyVersion | None = None

    @property
    def needs_pause(self) -> bool:
        """Whether the engine must stand still for the swap of what was staged last."""
        return self._mode.flushes_cache or self._staged is None

    async def stage(self, source: WeightSource, version: PolicyVersion) -> None:
        """Let the engine take weights while it generates, if it can.

        Raises:
            EngineError: names the bucket if one does not arrive.
        """
        self._staged = None
        with self._asking_anew_after_a_failure():
            if not await self._is_staging():
                return
            match source:
                case FolderWeights():
                    await self._load("/stage_weights", {"model_path": source.path}, version)
                case MappedWeights():
                    for index in range(len(source.payloads)):
                        await self._hand_over(source, index, "/stage_weights", {}, version)
                case BroadcastWeights():
                    await self._stage_broadcast(source, version)
        self._staged = version

    async def swap(self, source: WeightSource, version: PolicyVersion) -> None:
        """Let the engine serve what it has staged, or take the weights now; the last bucket names the version.

        Raises:
            EngineError: names the bucket if one does not arrive.
        """
        is_staged, flush = self._staged == version, {"flush_cache": self._mode.flushes_cache}
        with self._asking_anew_after_a_failure():
            # Under a pause a folder is named again: a server that has staged it knows it, and may hear of it twice.
            if is_staged and not (isinstance(source, FolderWeights) and self.needs_pause):
                await self._load("/swap_weights", {"in_place": not self.needs_pause, **flush}, version)
            elif isinstance(source, FolderWeights):
                body = {"model_path": source.path, "abort_all_requests": False, **flush}
                await self._load("/update_weights_from_disk", body, version)
            else:
                await self._take_buckets(source, version, flush)

    async def join_group(self, group: WeightGroup) -> None:
        """Let the engine's ranks join a group behind its rank 0. Raises EngineError."""
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._load("/init_weights_update_group", body)

    async def leave_group(self, name: str) -> None:
        """Let the engine leave a group. Raises EngineError."""
        await self._control("/destroy_weights_update_group", {"group_name": name})

    async def _take_buckets(
        self, source: MappedWeights | BroadcastWeights, version: PolicyVersion, flush: Mapping[str, Any]
    ) -> None:
        """Bucket after bucket into a paused engine."""
        last = len(source.payloads if isinstance(source, MappedWeights) else source.buckets) - 1
        async with self._update():
            for index in range(last + 1):
                more, label = (flush, version) if index == last else ({"flush_cache": False}, None)
                if isinstance(source, MappedWeights):
                    await self._hand_over(source, index, "/update_weights_from_tensor", more, label)
                else:
                    await self._receive(source, index, more, label)

    async def _hand_over(
        self, source: MappedWeights, index: int, path: str, more: Mapping[str, Any], label: PolicyVersion | None
    ) -> None:
        with _naming(f"bucket {index + 1} of {len(source.payloads)}"):
            await self._load(path, {"serialized_named_tensors": list(source.payloads[index]), **more}, label)

    async def _receive(
        self, source: BroadcastWeights, index: int, more: Mapping[str, Any], label: PolicyVersion | None
    ) -> None:
        """Waits for: both ends of the collective. Unblocked by: their ends, or the first failure of either."""
        body = {**_announce(source.buckets[index]), "group_name": source.group, "load_format": _LAYOUT, **more}
        with _naming(_place(source, index)):
            await both(self._load("/update_weights_from_distributed", body, label), source.send(index))

    async def _stage_broadcast(self, source: BroadcastWeights, version: PolicyVersion) -> None:
        """Announce all buckets at once, so that the engine waits for none of them between two of its steps.

        Waits for: both ends of the collective. Unblocked by: their ends, or the first failure of either.
        """
        body = {"group_name": source.group, "buckets": [_announce(bucket) for bucket in source.buckets]}
        index = 0

        async def send_all() -> None:
            nonlocal index
            for index in range(len(source.buckets)):
                await source.send(index)

        try:
            await both(self._load("/stage_weights", body, version), send_all())
        except EngineError as error:
            raise EngineError(f"{_place(source, index)}: {error}") from error

    async def _is_staging(self) -> bool:
        """Ask by a call that stages nothing. Raises EngineError if the engine cannot be reached."""
        if self._can_stage is None:
            try:
                await self._control("/stage_weights", {})
            except EngineRefusedError as error:
                self._can_stage = error.status != HTTPStatus.NOT_FOUND
        return self._can_stage is not False

    @contextmanager
    def _asking_anew_after_a_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._can_stage = self._staged = None
            raise

    @asynccontextmanager
    async def _update(self) -> AsyncIterator[None]:
        """Begin and end a weight update; servers that know no such calls need none.

        A session that a failed attempt left open is ended first: the engine allows one.
        """
        has_session = await self._begin()
        try:
            yield
        except BaseException:
            if has_session:
                with contextlib.suppress(EngineError):
                    await self._control("/end_weight_update", _DISCARD)
            raise
        if has_session:
            await self._control("/end_weight_update", {})

    async def _begin(self) -> bool:
        try:
            await self._control("/begin_weight_update", {})
        except EngineRefusedError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return False
            await self._control("/end_weight_update", _DISCARD)
            await self._control("/begin_weight_update", {})
        return True

    async def _control(self, path: str, body: Mapping[str, Any]) -> None:
        await self._http.control(path, body, self._config.control_s)

    async def _load(self, path: str, body: Mapping[str, Any], version: PolicyVersion | None = None) -> None:
        """A call that moves weights, and labels them with a version if one is given."""
        if version is not None:
            if self._labels.mark is not None:  # another run's mark is not to be overwritten
                self._labels.check((await self._http.read("/model_info")).get("weight_version"))
            body = {**body, "weight_version": self._labels.write(version)}
        await self._http.control(path, body, self._config.load_s)


async def both(first: Awaitable[Any], second: Awaitable[Any]) -> None:
    """Run two coroutines at once; the first failure cancels the other and is raised."""
    tasks = [asyncio.ensure_future(first), asyncio.ensure_future(second)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _announce(bucket: Bucket) -> dict[str, Any]:
    shapes = [list(shape) for shape in bucket.shapes]
    return {"names": list(bucket.names), "dtypes": list(bucket.dtypes), "shapes": shapes}


def _place(source: BroadcastWeights, index: int) -> str:
    return f"bucket {index + 1} of {len(source.buckets)} ({source.buckets[index].names[0]} ...)"


@contextmanager
def _naming(what: str) -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        raise EngineError(f"{what}: {error}") from error
