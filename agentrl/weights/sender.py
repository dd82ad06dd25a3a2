"""A process that holds staged weights and hands them out: torch, collectives and whatever may hang live here.

The publisher calls it through `SenderProcess` with deadlines, and kills it when it misses one: a collective
that waits for a dead engine cannot be ended in any other way.
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.process.parent import CHILD
from agentrl.process.remote import ChildProcess, ProcessDiedError, RemoteCallError
from agentrl.process.server import serve
from agentrl.types.errors import EngineError
from agentrl.types.weights import Bucket
from agentrl.weights.buckets import plan_buckets, weight_files

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Sender:
    """Lives in the child. Opens one folder of weights at a time; files are mapped, not copied."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._buckets: list[Bucket] = []
        self._group: Any = None
        self._shared: list[Any] = []
        self._gatherer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gather")
        self._gathered: dict[int, Future[torch.Tensor]] = {}
        self._buffers: dict[int, torch.Tensor] = {}

    def join(
        self, rank: int, address: str, port: int, world_size: int, name: str, backend: str, timeout_s: float, gpu: int
    ) -> None:
        """Meet others in a process group; rank 0 sends, an engine's ranks receive. NCCL sends from `gpu`."""
        import torch

        from agentrl.weights.process_group import join_group

        device = torch.device("cuda", gpu)
        if backend == "nccl":
            torch.cuda.set_device(device)
        self._group = join_group(address, port, world_size, rank, name, backend, timeout_s, device)

    def open(self, folder: str, bucket_bytes: int) -> list[Bucket]:
        """Map a folder's weights and say how they are cut into buckets."""
        from safetensors.torch import load_file

        self._buckets = plan_buckets(Path(folder), bucket_bytes)
        self._tensors = {}
        for file in weight_files(Path(folder)):
            self._tensors.update(load_file(file))
        self._gathered = {}
        return self._buckets

    def gather(self, index: int) -> None:
        """Begin to flatten a bucket, if there is such a one."""
        if index < len(self._buckets) and index not in self._gathered:
            self._gathered[index] = self._gatherer.submit(self._flatten, index)

    def broadcast(self, index: int) -> None:
        """Send a bucket, flattened to bytes, to the group, while the next one is gathered."""
        from agentrl.weights.process_group import broadcast

        self.gather(index)
        flat = self._gathered.pop(index).result()
        self.gather(index + 1)
        broadcast(flat, self._group)

    def _flatten(self, index: int) -> torch.Tensor:
        """A bucket's bytes, in one of two buffers that take turns."""
        import torch

        size = max(bucket.num_bytes for bucket in self._buckets)
        buffer = self._buffers.get(index % 2)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[index % 2] = torch.empty(size, dtype=torch.uint8)
        pieces = [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in self._named(index)]
        return torch.cat(pieces, out=buffer[: self._buckets[index].num_bytes])

    def share(self, num_readers: int, device: str) -> list[list[str]]:
        """Put all buckets into memory of a device that others can map: shared memory, or a GPU's by CUDA IPC.

        Returns for each bucket a payload for every reader, good until the next call.

        A payload serves one reader: reading gives back a count that keeps the memory alive.
        """
        from agentrl.weights.payloads import shared_payload

        self._shared = []  # else the memory holds the last weights and these at once
        self._shared = [[(n, t.to(device, copy=True)) for n, t in self._named(i)] for i in range(len(self._buckets))]
        return [[shared_payload(pairs) for _ in range(num_readers)] for pairs in self._shared]

    def delta(self, old: str, new: str, target: str, full_above: float) -> int:
        """Encode what changed between two folders to a file; returns its bytes."""
        from agentrl.weights.delta_codec import encode_delta

        return encode_delta(Path(old), Path(new), Path(target), full_above)

    def rebuild(self, old: str, delta: str, target: str, checksums: dict[str, str]) -> None:
        """Make new weights of old ones and a delta, and check them."""
        from agentrl.weights.delta_codec import apply_delta

        apply_delta(Path(old), Path(delta), Path(target), checksums)

    def _named(self, index: int) -> list[tuple[str, torch.Tensor]]:
        return [(name, self._tensors[name]) for name in self._buckets[index].names]


class SenderProcess:
    """The publisher's side of a sender."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child

    @classmethod
    async def start(cls, name: str, log: Path) -> SenderProcess:
        """Start the process; it is ready when its first call returns."""
        return cls(await ChildProcess.start(name, [*CHILD, "agentrl.weights.sender"], log))

    async def call(self, method: str, *arguments: Any, result: type[T], deadline_s: float) -> T:
        """Call the sender; a call that fails or is cut off kills it.

        Raises:
            EngineError: it failed, died, or missed the deadline.
        """
        try:
            return await self._child.call(method, *arguments, result=result, deadline_s=deadline_s)
        except (RemoteCallError, ProcessDiedError) as error:
            self.kill()
            raise EngineError(f"sender: {error}") from error
        except TimeoutError:
            self.kill()
            raise EngineError(f"sender: {method} took longer than {deadline_s:g} s") from None
        except asyncio.CancelledError:
            self.kill()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._child.is_alive

    def kill(self) -> None:
        """End it at once; safe to call twice."""
        self._child.kill()


def main() -> None:
    """Entry of the process: ``python -m agentrl.weights.sender FD``."""
    serve(Sender(), int(sys.argv[1]))


if __name__ == "__main__":
    main()
