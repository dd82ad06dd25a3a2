"""Routes that bring new weights: staged beside the served ones, then exchanged between two steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.engine.broadcasts import read_broadcast
from agentrl.engine.collective import WeightGroups
from agentrl.engine.files import Pace, read_in_time
from agentrl.engine.request import BadRequestError, field_of
from agentrl.engine.scheduler import Scheduler
from agentrl.engine.unpickler import load_bucket, load_named_tensors, payload_of
from agentrl.engine.weights import StagedWeights, WeightStore, read_folder
from agentrl.process.threads import run_in_thread

Handler = Callable[[dict[str, Any]], Awaitable[Any]]
# Folder, then name, bytes and time of change of each file of weights.
_Stamp = tuple[str, tuple[tuple[str, int, int], ...]]


@dataclass(slots=True)
class _Session:
    """What came between begin and end.

    Invariant: after a failure nothing of the session is served, however many buckets came before.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    flushes: bool = False
    _staged: StagedWeights = field(default_factory=StagedWeights)
    _has_failed: bool = False

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Around all that may refuse a bucket. Raises BadRequestError also if an earlier one was refused."""
        if self._has_failed:
            raise BadRequestError("an earlier bucket was refused; end this weight update and begin another")
        try:
            yield
        except BadRequestError:
            self._has_failed = True
            raise

    def add(self, staged: StagedWeights, flushes: bool) -> None:
        """Take in a bucket."""
        self._staged = self._staged.with_more(staged)
        self.flushes = self.flushes or flushes

    def take(self) -> StagedWeights:
        """All buckets that came since the last call; nothing after a failure."""
        staged, self._staged = self._staged, StagedWeights()
        return StagedWeights() if self._has_failed else staged


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Weights that were staged ahead of a pause; `stamp` is that of the folder they came from, None for tensors."""

    version: str
    stamp: _Stamp | None
    weights: StagedWeights

    def is_of(self, version: str | None, stamp: _Stamp | None) -> bool:
        """Whether these are the weights of that version and origin, unchanged since."""
        return self.version == version and self.stamp == stamp


class UpdateRoutes:
    """Weight updates. Nothing is served before all of it was checked.

    Tensors and broadcasts need an open session, as on the real server. Unlike there, their buckets are
    served together, with the one that names the version or else at the session's end; a session with a
    bucket that failed serves nothing, nor does one that ends with ``discard``. Two calls are our own:
    ``/stage_weights`` takes weights, from a folder, tensors or a broadcast, while tokens are drawn, and
    ``/swap_weights`` serves what was staged under a version; an update from the same folder does too. With
    ``in_place`` it needs no pause: it exchanges between two steps, as under a pause in place.
    """

    def __init__(self, scheduler: Scheduler, store: WeightStore, collective_s: float) -> None:
        self._scheduler, self._store = scheduler, store
        self._groups = WeightGroups(collective_s, store.device)
        self._session: _Session | None = None
        self._prepared: _Prepared | None = None

    def routes(self) -> dict[str, Handler]:
        """POST routes by path; each takes the JSON body."""
        return {
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/update_weights_from_disk": self._from_disk,
            "/update_weights_from_tensor": self._from_tensor,
            "/update_weights_from_distributed": self._from_distributed,
            "/init_weights_update_group": self._join,
            "/destroy_weights_update_group": self._leave,
            "/stage_weights": self._stage,
            "/swap_weights": self._swap,
            "/update_weight_version": self._relabel,
            "/weights_checker": self._check,
        }

    async def _begin(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._session is not None:
            raise BadRequestError("a weight update is open already; end it first")
        self._session = _Session()
        async with self._scheduler.still():
            pass
        return {"status": "ok", "message": "Weight update begun."}

    async def _end(self, body: dict[str, Any]) -> dict[str, Any]:
        session = self._session
        if session is None:
            raise BadRequestError("no weight update is open; begin one first")
        self._session = None
        staged = session.take()
        if staged.tensors and not body.get("discard"):
            await self._serve(staged, None, session.flushes)
        return {"status": "ok", "message": "Weight update ended."}

    async def _from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        folder = field_of(body, "model_path", str)
        with self._scheduler.held_queue():
            prepared = self._prepared
            stamp = await _stamp(folder)
            if prepared is not None and prepared.is_of(_version(body), stamp):
                staged = prepared.weights
            else:
                staged = await self._stage_folder(folder)
            return await self._serve(staged, _version(body), body.get("flush_cache", True))

    async def _from_tensor(self, body: dict[str, Any]) -> dict[str, Any]:
        session = self._open_session("update_weights_from_tensor")
        read = _tensor_reader(body)
        return await self._add(session, body, lambda: run_in_thread("read-tensors", lambda: self._store.stage(read())))

    async def _from_distributed(self, body: dict[str, Any]) -> dict[str, Any]:
        session = self._open_session("update_weights_from_distributed")
        return await self._add(session, body, lambda: self._receive(body))

    async def _join(self, body: dict[str, Any]) -> dict[str, Any]:
        name = await self._groups.join(body)
        return {"success": True, "message": f"Group {name} formed."}

    async def _leave(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"success": True, "message": f"Group {self._groups.leave(body)} destroyed."}

    async def _stage(self, body: dict[str, Any]) -> dict[str, Any]:
        version, stamp = field_of(body, "weight_version", str), None
        if "model_path" in body:
            folder = field_of(body, "model_path", str)
            stamp, staged = await _stamp(folder), await self._stage_folder(folder)
            staged = await run_in_thread("digest", staged.with_digests)
        elif "group_name" in body:
            staged = await self._receive(body)
        else:
            read = _tensor_reader(body)
            staged = await run_in_thread("stage", lambda: self._store.stage(read()).with_digests())
        before = self._prepared
        if stamp is None and before is not None and before.is_of(version, None):
            staged = before.weights.with_more(staged)
        self._prepared = _Prepared(version, stamp, staged)
        return {"success": True, "message": f"Weights of version {version} staged.", "num_bytes": staged.num_bytes}

    async def _swap(self, body: dict[str, Any]) -> dict[str, Any]:
        version = field_of(body, "weight_version", str)
        self._staged_as(version)
        if not body.get("in_place"):
            async with self._scheduler.still():
                return self._serve_now(self._staged_as(version), version, body.get("flush_cache", True))
        async with self._scheduler.between_steps():
            return self._exchange(self._staged_as(version), version)

    def _staged_as(self, version: str) -> StagedWeights:
        """Raises BadRequestError, also to a call whose repetition was served while it waited for the step under way."""
        if self._prepared is None or self._prepared.version != version:
            raise BadRequestError(f"nothing is staged as version {version}; call stage_weights first")
        return self._prepared.weights

    async def _relabel(self, body: dict[str, Any]) -> dict[str, Any]:
        version = field_of(body, "new_version", str)
        async with self._scheduler.between_steps():
            if body.get("abort_all_requests", True):
                self._scheduler.abort(None)
            self._scheduler.relabel(version)
        return {"success": True, "message": f"Weight version updated to {version}.", "new_version": version}

    async def _check(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("action") != "checksum":
            raise BadRequestError("weights_checker serves the action 'checksum' only")
        return {"success": True, "checksums": self._store.checksums(), "weight_version": self._scheduler.version}

    async def _stage_folder(self, folder: str) -> StagedWeights:
        tensors = await read_in_time(f"weights in {folder}", lambda pace: read_folder(Path(folder), pace))
        return await run_in_thread("stage", lambda: self._store.adopt_whole(tensors, folder))

    async def _receive(self, body: dict[str, Any]) -> StagedWeights:
        """Waits as a broadcast does. Until it has come the sender and all engines wait for this one's answers."""
        with self._scheduler.loop_needed():
            return await read_broadcast(body, self._groups, self._store)

    def _open_session(self, call: str) -> _Session:
        if self._session is None:
            raise BadRequestError(f"{call} must run between begin_weight_update() and end_weight_update()")
        return self._session

    async def _add(
        self, session: _Session, body: dict[str, Any], read: Callable[[], Awaitable[StagedWeights]]
    ) -> dict[str, Any]:
        """Take a bucket into a session, and serve all of them if it names a version."""
        flushes, version = bool(body.get("flush_cache", True)), _version(body)
        async with session.lock:
            with session.receiving():
                staged = await read()
                self._check_flush(flushes)
            if self._session is not session:
                raise BadRequestError("the weight update ended before this bucket had come; it is not served")
            session.add(staged, flushes)
            if version is None:
                return self._answer(staged.num_bytes)
            return await self._serve(session.take(), version, session.flushes)

    async def _serve(self, staged: StagedWeights, version: str | None, flushes: bool) -> dict[str, Any]:
        """Exchange while nothing runs; flush first, so that a refusal leaves the engine as it was."""
        async with self._scheduler.still():
            return self._serve_now(staged, version, flushes)

    def _serve_now(self, staged: StagedWeights, version: str | None, flushes: bool) -> dict[str, Any]:
        self._check_flush(flushes)
        if flushes:
            self._scheduler.flush()
        return self._exchange(staged, version)

    def _exchange(self, staged: StagedWeights, version: str | None) -> dict[str, Any]:
        """Serve from the next step on; requests that run go on with the KV they have."""
        old = self._store.swap(staged)
        self._scheduler.loaded(version)
        self._prepared = None
        threading.Thread(target=old.clear, name="free-weights", daemon=True).start()
        return self._answer(staged.num_bytes)

    def _check_flush(self, flushes: bool) -> None:
        if flushes and self._scheduler.pause_mode is not None and self._scheduler.num_running:
            num_frozen = self._scheduler.num_running
            raise BadRequestError(f"{num_frozen} frozen requests hold KV; send flush_cache=false or pause by retract")

    def _answer(self, num_bytes: int) -> dict[str, Any]:
        return {
            "success": True,
            "message": f"Succeeded to update model weights. Weight version updated to {self._scheduler.version}.",
            "num_paused_requests": self._scheduler.num_running,
            "num_bytes": num_bytes,
        }


def _tensor_reader(body: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    payload = payload_of(body)
    layout = body.get("load_format")
    if layout not in (None, "direct", "flattened_bucket"):
        raise BadRequestError(f"load_format {layout!r} is not served; use null or 'flattened_bucket'")
    load = load_bucket if layout == "flattened_bucket" else load_named_tensors
    return lambda: load(payload)


def _version(body: dict[str, Any]) -> str | None:
    version = body.get("weight_version")
    return None if version is None else str(version)


async def _stamp(folder: str) -> _Stamp:
    """What tells a folder's weights from others that are put there later. Raises BadRequestError."""

    def look(pace: Pace) -> _Stamp:
        path = Path(folder)
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
        stats = [(file.name, file.stat()) for file in files]
        return folder, tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)

    return await read_in_time(f"weights in {folder}", look)
