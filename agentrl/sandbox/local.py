"""Commands without a sandbox, in a folder of this machine: for tasks that one trusts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.config.base import ConfigModel
from agentrl.sandbox.backend import BackendDefinition, Exit, Output
from agentrl.sandbox.network import gateway_variables
from agentrl.sandbox.relay import Relay, to_unix_socket
from agentrl.sandbox.streams import ENTER, carry, gone, start_program
from agentrl.types.sandbox import WORKSPACE, Command, Guarantee, SandboxSpec

_NOTHING = "the local sandbox isolates nothing; use bwrap or docker"


class LocalOptions(ConfigModel):
    """Options of the local backend, of which there are none."""


@dataclass(slots=True)
class LocalBackend:
    """Gives each sandbox a folder and nothing else."""

    root: Path
    guarantees: frozenset[Guarantee] = frozenset({Guarantee.GATEWAY})
    missing: Mapping[Guarantee, str] = field(default_factory=lambda: dict.fromkeys(Guarantee, _NOTHING))

    async def create(self, spec: SandboxSpec, snapshot: str | None = None) -> LocalPlace:
        """A folder, empty or a copy of a snapshot."""
        folder = Path(tempfile.mkdtemp(dir=self.root))
        if snapshot is not None:
            await _copy(self._snapshot_folder(snapshot), folder)
        return LocalPlace(self, spec, folder)

    async def forget(self, snapshot: str) -> None:
        """Remove a snapshot."""
        await asyncio.to_thread(shutil.rmtree, self._snapshot_folder(snapshot), ignore_errors=True)

    async def close(self) -> None:
        """Remove the folder of all."""
        await asyncio.to_thread(shutil.rmtree, self.root, ignore_errors=True)

    async def keep(self, folder: Path, snapshot: str) -> None:
        """Keep a folder's files under a name."""
        await _copy(folder, self._snapshot_folder(snapshot))

    def _snapshot_folder(self, name: str) -> Path:
        return self.root / f"snapshot.{name}"


class LocalPlace:
    """One folder; its path stands for the workspace's in the folder of a command and in its arguments."""

    def __init__(self, backend: LocalBackend, spec: SandboxSpec, folder: Path) -> None:
        self._backend, self._spec, self._folder = backend, spec, folder

    async def run(self, command: Command, stdin: AsyncIterator[bytes], output: Output) -> Exit:
        """Run a command in a process group of its own, which is killed at its end."""
        home, relay = str(self._folder), Relay()
        words = [self._here(word) for word in (command.folder, *command.arguments)]
        try:
            network = await _reach_gateway(command, relay)
            environment = {**os.environ, "HOME": home, **network, **self._spec.environment, **command.environment}
            process = await start_program(("/bin/sh", "-c", ENTER, "sh", *words), environment, home)
            return await self._carried(process, stdin, output)
        finally:
            relay.end()

    async def _carried(self, process: asyncio.subprocess.Process, stdin: AsyncIterator[bytes], output: Output) -> Exit:
        try:
            code = await carry(process, stdin, output)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(gone(process))
        return Exit(code if code >= 0 else 128 - code)

    async def snapshot(self, name: str) -> None:
        """Copy the folder."""
        await self._backend.keep(self._folder, name)

    async def close(self) -> None:
        """Remove the folder."""
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _here(self, path: str) -> str:
        """A path below the workspace as it is on this machine; any other word as it is."""
        if path == WORKSPACE or path.startswith(f"{WORKSPACE}/"):
            return f"{self._folder}{path.removeprefix(WORKSPACE)}"
        return path


async def start(options: LocalOptions, label: str) -> LocalBackend:
    """A backend over a new folder, whose name bears the label."""
    return LocalBackend(Path(tempfile.mkdtemp(prefix=f"agentrl-local-{label}-")))


async def _copy(source: Path, target: Path) -> None:
    await asyncio.to_thread(shutil.copytree, source, target, symlinks=True, dirs_exist_ok=True)


definition = BackendDefinition("local", "no isolation, for tasks that you trust", LocalOptions, start)


async def _reach_gateway(command: Command, relay: Relay) -> Mapping[str, str]:
    """Variables that tell a command of its gateway, which is carried from a port of this machine's loopback."""
    if command.gateway is None:
        return {}
    listener = socket.create_server(("127.0.0.1", 0))
    await relay.listen(listener, to_unix_socket(command.gateway))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    known = os.environ.get("NO_PROXY") or os.environ.get("no_proxy", "")
    return gateway_variables(url, known)
