"""Transport by shared disk: engines read the safetensors that the trainer staged."""

from __future__ import annotations

import asyncio
import json
import struct
from pathlib import Path

from agentrl.protocols import Engine
from agentrl.types.batch import WeightsManifest
from agentrl.types.errors import StorageError
from agentrl.types.weights import FolderWeights

_SIZE_BYTES = 8  # of the header's size, in front of a safetensors file


class DiskTransport:
    """The staged folder must be readable by the engine under the same path.

    Embedded engines read it before their pause; to SGLang, which knows no such call, it is new in the pause.
    """

    def __init__(self) -> None:
        self.sent_bytes = 0

    async def needs_pause(self, engine: Engine) -> bool:
        """As the engine says."""
        return await engine.needs_pause()

    async def prepare(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Let the engine read and check the folder while it generates. Raises EngineError, or StorageError."""
        if (folder := Path(manifest.path)).is_dir():  # else it is another machine's, and the engine's to judge
            await asyncio.to_thread(check_staged, folder)
        await engine.stage(FolderWeights(manifest.path), manifest.version)

    async def send(self, engine: Engine, manifest: WeightsManifest) -> None:
        """Let an engine serve what it has read, or a paused one load the staged folder. Raises EngineError."""
        await engine.swap(FolderWeights(manifest.path), manifest.version)
        self.sent_bytes += manifest.num_bytes

    async def forget(self, engine: str) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing is kept."""


def check_staged(folder: Path) -> None:
    """Whether each safetensors file of a folder is as long as its header says: SGLang dies of one that is cut short.

    A file that is pruned meanwhile is the engine's to judge.

    Raises:
        StorageError: one is not.
    """
    for file in sorted(folder.glob("*.safetensors")):
        try:
            found_bytes, told_bytes = file.stat().st_size, _told_bytes(file)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, LookupError, TypeError, struct.error) as error:
            raise _damaged(file, f"its header cannot be read: {type(error).__name__} {error}") from error
        if found_bytes != told_bytes:
            raise _damaged(file, f"it has {found_bytes} bytes instead of {told_bytes}")


def _told_bytes(file: Path) -> int:
    """The size of a safetensors file by its header."""
    with file.open("rb") as stream:
        (header_bytes,) = struct.unpack("<Q", stream.read(_SIZE_BYTES))
        if header_bytes > file.stat().st_size:
            raise ValueError(f"it is to have {header_bytes} bytes")
        header = json.loads(stream.read(header_bytes))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return int(_SIZE_BYTES + header_bytes + max(ends, default=0))


def _damaged(file: Path, how: str) -> StorageError:
    return StorageError(
        f"staged weights are damaged: {file}: {how}. Look at the disk, then resume the run, which stages them anew"
    )
