"""What attempts to get out of a sandbox are after, and whether they reached it."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Outside:
    """What attempts are after."""

    folder: Path
    secret: str
    port: int
    abstract: str
    process: subprocess.Popen[bytes]
    reached: list[str] = field(default_factory=list)

    @property
    def secret_file(self) -> Path:
        """A file with the secret, which anybody on this machine may read."""
        return self.folder / "secret"

    @property
    def kept_file(self) -> Path:
        """A file that anybody on this machine may write."""
        return self.folder / "kept"

    def faults(self, said: bytes) -> list[str]:
        """What has happened outside that should not have; `said` is what the attempt brought out."""
        found = [f"reached {name}" for name in self.reached]
        self.reached.clear()
        if self.secret.encode() in said:
            found.append("read the secret")
        if self.kept_file.read_text() != "as it was":
            found.append("wrote outside")
            self.kept_file.write_text("as it was")
        if self.process.poll() is not None:
            found.append("killed a process outside")
        return found


@contextmanager
def outside(folder: Path) -> Iterator[Outside]:
    """The targets, in a folder that every user of this machine can enter."""
    folder.chmod(0o755)
    abstract = f"agentrl-{secrets.token_hex(6)}"
    process = subprocess.Popen(["sleep", "infinity"])
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0{abstract}")
        unix.listen()
        targets = Outside(folder, secrets.token_hex(16), tcp.getsockname()[1], abstract, process)
        targets.secret_file.write_text(targets.secret)
        targets.kept_file.write_text("as it was")
        targets.kept_file.chmod(0o666)
        for name, listener in (("tcp", tcp), ("unix", unix)):
            threading.Thread(target=_note, args=(listener, name, targets.reached), daemon=True).start()
        try:
            yield targets
        finally:
            process.kill()
            process.wait()


def _note(listener: socket.socket, name: str, reached: list[str]) -> None:
    """Waits for: connections. Unblocked by: these, or the end of the listener."""
    while True:
        try:
            listener.accept()[0].close()
        except OSError:
            return
        reached.append(name)


def running_with(word: str) -> list[int]:
    """Processes of this machine that have a word on their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if word.encode() in words:
                found.append(int(folder.name))
    return found
