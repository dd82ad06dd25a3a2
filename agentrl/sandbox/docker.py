"""Sandboxes by Docker: one locked container each, on one engine or several.

A container has no network, a root file system that is only read, limits, and an unprivileged user without capabilities
for commands. Workspace and ``/tmp`` lie in memory, so what a command writes counts towards `memory_bytes`, too.
Together with shared memory they are bounded by `disk_bytes`: a quarter is for ``/tmp``, a sixteenth for shared memory,
the rest for the workspace. A container lives exactly as long as the keeper's connection to it (`docker_watcher.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from agentrl.config.base import ConfigModel
from agentrl.sandbox import docker_watcher
from agentrl.sandbox.backend import BackendDefinition
from agentrl.sandbox.docker_engine import DockerEngine, EngineRefusedError, EngineSilentError
from agentrl.sandbox.docker_keeper import KEEPER_LABEL, SANDBOX_LABEL, KeeperName, remove_all, remove_leftovers
from agentrl.sandbox.docker_place import DockerPlace
from agentrl.sandbox.docker_snapshots import SnapshotStore
from agentrl.sandbox.docker_watcher import Watcher
from agentrl.types.errors import Boundary, ConfigError, EpisodeError
from agentrl.types.sandbox import WORKSPACE, Guarantee, SandboxSpec

DEFAULT_DISK_BYTES = 1 << 30
"""Bound on the files of a sandbox whose task asks for none."""
_DEFAULT_HOST = "unix:///var/run/docker.sock"
# What an engine's info must say for each.
_FEATURES = {
    Guarantee.MEMORY: ("MemoryLimit", "SwapLimit"),
    Guarantee.PROCESSES: ("PidsLimit",),
    Guarantee.CPU: ("CpuCfsQuota",),
}
# Init, the watcher and the shell of a command, and what the engine needs for a moment to start one.
_OWN_PROCESSES = 16
_MOST_ARCHIVED = 4  # times the bytes of the disk, names and padding of many small files included
_BYTES_PER_FILE = 1024  # an empty file takes kernel memory, too
_RETRY_S = 5.0
_NOT_FOUND = 404
_log = logging.getLogger(__name__)


class DockerOptions(ConfigModel):
    """Which Docker engines have the sandboxes, and what these are like."""

    hosts: tuple[str, ...] = ()
    """URLs of engines as ``unix://PATH`` or ``tcp://HOST:PORT``. Empty: ``DOCKER_HOST`` of the environment, else the
    default socket. A sandbox goes where most places are free."""
    image: str = "python:3.12-slim"
    """Image for tasks that name none. It needs /bin/sh, and tar for files and snapshots. Nothing is pulled."""
    user: Annotated[str, Field(pattern=r"^[1-9]\d*:\d+$")] = "1000:1000"
    """User and group ids of commands, as ``uid:gid``; not root."""
    per_host: Annotated[int, Field(gt=0)] = 160
    """Sandboxes that an engine has at most, warm ones and those of verifiers included."""
    call_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds for an engine to answer a call. Raise it where starting many containers at once is slower."""


class DockerBackend:
    """Makes containers on several engines; one that does not answer is passed over until it does again."""

    def __init__(self, options: DockerOptions, label: str, engines: list[DockerEngine]) -> None:
        self.guarantees: frozenset[Guarantee] = frozenset()
        self.missing: Mapping[Guarantee, str] = {}
        self._options, self._label, self._engines = options, label, engines
        self._keeper = KeeperName.of_this_process()
        self._snapshots = SnapshotStore()
        self._silent: dict[DockerEngine, asyncio.Task[None]] = {}
        self._places: set[DockerPlace] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def begin(self) -> None:
        """Probe the engines, and remove what is left on them of keepers that are gone. Raises ConfigError."""
        found = await asyncio.gather(*(self._probe(engine) for engine in self._engines), return_exceptions=True)
        errors = [str(entry) for entry in found if isinstance(entry, EpisodeError)]
        other = next((e for e in found if isinstance(e, BaseException) and not isinstance(e, EpisodeError)), None)
        if other is not None:
            raise other
        missing = [entry for entry in found if isinstance(entry, dict)]
        if not missing:
            raise ConfigError(
                f"sandbox 'docker': {'; '.join(errors)}; start it, or name others by DOCKER_HOST or the option hosts"
            )
        self.missing = {guarantee: reason for entry in missing for guarantee, reason in entry.items()}
        self.guarantees = frozenset(Guarantee) - set(self.missing)
        for engine, entry in zip(self._engines, found, strict=True):
            if isinstance(entry, EpisodeError):
                self._pass_over(engine, entry)

    async def create(self, spec: SandboxSpec, snapshot: str | None = None) -> DockerPlace:
        """A container where most places are free."""
        making = asyncio.create_task(self._create(spec, snapshot), name="docker-create")
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            self._keep(asyncio.create_task(_discard(making), name="docker-discard"))
            raise

    async def forget(self, snapshot: str) -> None:
        """Remove a snapshot."""
        self._snapshots.forget(snapshot)

    async def close(self) -> None:
        """Remove all containers of this keeper, wherever an engine answers."""
        for task in self._silent.values():
            task.cancel()
        await asyncio.gather(*self._silent.values(), *self._tasks, return_exceptions=True)
        self._silent.clear()
        await asyncio.gather(*(place.close() for place in list(self._places)))
        for engine in self._engines:
            try:
                await remove_all(engine, self._keeper)
            except EpisodeError as error:
                _log.warning("containers of this run end by themselves, but could not be removed: %s", error)
            engine.close()
        self._snapshots.close()

    async def _probe(self, engine: DockerEngine) -> dict[Guarantee, str]:
        """What is missing on an engine, with the reason. Raises EpisodeError if it does not answer."""
        info = await engine.call(lambda api: api.info())
        await remove_leftovers(engine, self._keeper)
        return missing_on(engine.url, info)

    async def _create(self, spec: SandboxSpec, snapshot: str | None) -> DockerPlace:
        while engine := self._roomiest():
            try:
                return await self._create_on(engine, spec, snapshot)
            except EngineSilentError as error:
                self._pass_over(engine, error)
        raise EpisodeError(
            Boundary.SANDBOX,
            "unavailable",
            f"no Docker engine has a place: {len(self._silent)} of {len(self._engines)} do not answer, the others have "
            f"{self._options.per_host} sandboxes each",
        )

    def _roomiest(self) -> DockerEngine | None:
        """The engine with the most free places; None if all are full or silent."""
        usable = [e for e in self._engines if e not in self._silent and e.taken < self._options.per_host]
        return min(usable, key=lambda engine: engine.taken, default=None)

    def _pass_over(self, engine: DockerEngine, error: EpisodeError) -> None:
        if engine not in self._silent:
            _log.warning("%s; it gets no sandboxes until it does", error.failure.message)
            self._silent[engine] = asyncio.create_task(self._take_back(engine), name="docker-retry")

    async def _take_back(self, engine: DockerEngine) -> None:
        """Wait until an engine answers. Unblocked by: an answer, or the end of the backend."""
        while True:
            await asyncio.sleep(_RETRY_S)
            try:
                missing = await self._probe(engine)
            except EpisodeError:
                continue
            if missing.keys() <= self.missing.keys():
                break
            _log.warning("%s answers, but does not enforce what the others do; it gets no sandboxes", engine.url)
        _log.warning("%s answers again", engine.url)
        del self._silent[engine]

    async def _create_on(self, engine: DockerEngine, spec: SandboxSpec, snapshot: str | None) -> DockerPlace:
        engine.taken += 1
        name = f"agentrl-{secrets.token_hex(8)}"

        def release(place: DockerPlace) -> None:
            if place in self._places:
                self._places.remove(place)
                engine.taken -= 1

        try:
            watcher = await self._start(engine, name, spec)
        except BaseException:
            engine.taken -= 1
            raise
        most = _MOST_ARCHIVED * _disk_of(spec)
        place = DockerPlace(engine, name, watcher, self._options.user, self._snapshots, most, release)
        self._places.add(place)
        try:
            await self._begin(watcher, engine, spec)
            if snapshot is not None:
                await self._snapshots.restore(snapshot, place.run)
        except BaseException:
            await place.close()
            raise
        return place

    async def _start(self, engine: DockerEngine, name: str, spec: SandboxSpec) -> Watcher:
        """Start a container, attached to. Raises EpisodeError."""
        image = spec.image or self._options.image
        try:
            await engine.call(lambda api: self._make(api, name, image, spec))
        except EngineRefusedError as error:
            if error.status != _NOT_FOUND:
                raise
            message = f"there is no image {image} at {engine.url}; nothing is pulled: docker pull {image}"
            raise EpisodeError(Boundary.SANDBOX, "image", message) from error
        try:
            watcher = Watcher(await engine.open_stream(f"/containers/{name}/attach?stream=1&stdin=1&stdout=1", {}))
            try:
                await engine.call(lambda api: api.start(name))
            except BaseException:
                await watcher.close()
                raise
        except EpisodeError as error:
            await engine.remove(name)
            if isinstance(error, EngineRefusedError):
                raise self._no_start(engine, spec, error.reason) from error
            raise
        return watcher

    async def _begin(self, watcher: Watcher, engine: DockerEngine, spec: SandboxSpec) -> None:
        """Wait for the main process. Raises EpisodeError: of the engine if that does not answer, else of the image."""
        try:
            await watcher.begin()
        except EpisodeError as error:
            await engine.call(lambda api: api.ping())
            raise self._no_start(engine, spec, error.failure.message) from error

    def _no_start(self, engine: DockerEngine, spec: SandboxSpec, reason: str) -> EpisodeError:
        image = spec.image or self._options.image
        message = f"no container of image {image} stays up at {engine.url} (it needs /bin/sh): {reason}"
        return EpisodeError(Boundary.SANDBOX, "image", message)

    def _make(self, api: Any, name: str, image: str, spec: SandboxSpec) -> None:
        api.create_container(
            image,
            list(docker_watcher.COMMAND),
            name=name,
            user=docker_watcher.USER,
            entrypoint=[],
            stdin_open=True,
            environment=dict(spec.environment),
            working_dir=WORKSPACE,
            labels={SANDBOX_LABEL: self._label, KEEPER_LABEL: str(self._keeper)},
            host_config=api.create_host_config(**_limits(spec, self._options.user)),
        )

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _disk_of(spec: SandboxSpec) -> int:
    """Bytes that all files of a sandbox may have."""
    if spec.disk_bytes is not None:
        return spec.disk_bytes
    return DEFAULT_DISK_BYTES if spec.memory_bytes is None else min(DEFAULT_DISK_BYTES, spec.memory_bytes // 2)


def _limits(spec: SandboxSpec, user: str) -> dict[str, Any]:
    """What a container may do, as arguments of the SDK's `create_host_config`."""
    uid, gid = user.split(":")
    disk = _disk_of(spec)
    tmp, shm = disk // 4, disk // 16
    sizes = {WORKSPACE: disk - tmp - shm, "/tmp": tmp}
    limits: dict[str, Any] = {}
    if spec.memory_bytes is not None:
        limits |= {"mem_limit": spec.memory_bytes, "memswap_limit": spec.memory_bytes}
    if spec.processes is not None:
        limits["pids_limit"] = spec.processes + _OWN_PROCESSES
    if spec.cpus is not None:
        limits["nano_cpus"] = int(spec.cpus * 1e9)
    return limits | {
        "network_mode": "none",
        "read_only": True,
        "cap_drop": ["ALL"],
        "cap_add": list(docker_watcher.RIGHTS),
        "security_opt": ["no-new-privileges"],
        "tmpfs": {
            path: f"rw,exec,nosuid,nodev,size={size},nr_inodes={size // _BYTES_PER_FILE + 16},uid={uid},gid={gid}"
            for path, size in sizes.items()
        },
        "shm_size": max(shm, 4096),
        "ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
        "init": True,
        "auto_remove": True,
        "log_config": {"type": "none"},
    }


def missing_on(url: str, info: dict[str, Any]) -> dict[Guarantee, str]:
    """What an engine does not enforce, by its own words."""
    missing = dict.fromkeys(
        (Guarantee.ALLOWLIST, Guarantee.GATEWAY), "a container of this backend has no network at all; use bwrap"
    )
    for guarantee, features in _FEATURES.items():
        lacking = [feature for feature in features if not info.get(feature)]
        if lacking:
            missing[guarantee] = (
                f"the engine at {url} lacks {' and '.join(lacking)} (docker info); its kernel or cgroups"
            )
    if not any("seccomp" in entry and "unconfined" not in entry for entry in info.get("SecurityOptions") or ()):
        missing[Guarantee.FILES] = f"the engine at {url} filters no system calls (docker info names no seccomp profile)"
    return missing


async def _discard(making: asyncio.Task[DockerPlace]) -> None:
    """Close a place that nobody waits for any more."""
    try:
        place = await making
    except EpisodeError:
        return
    await place.close()


async def start(options: DockerOptions, label: str) -> DockerBackend:
    """Probe the engines. Raises ConfigError if none answers."""
    hosts = options.hosts or (os.environ.get("DOCKER_HOST") or _DEFAULT_HOST,)
    engines = [DockerEngine(url, options.call_s, options.per_host) for url in hosts]
    backend = DockerBackend(options, label, engines)
    try:
        await backend.begin()
    except BaseException:
        for engine in engines:  # which have been asked for nothing
            engine.close()
        raise
    return backend


definition = BackendDefinition("docker", "locked containers of one or several Docker engines", DockerOptions, start)
