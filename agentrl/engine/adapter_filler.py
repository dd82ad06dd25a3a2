"""A process that reads the later versions of an adapter to where an engine serves them from.

The engine and this process map the same memory. To read 20 MB in a thread of the engine costs the step beside it about
a millisecond, for both threads want the interpreter; in a process apart it costs none.
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

from agentrl.engine.adapter_file import open_adapter
from agentrl.engine.request import BadRequestError
from agentrl.process.parent import die_with_parent, leave_stopping_to_parent
from agentrl.process.remote import ChildProcess, RemoteCallError
from agentrl.process.server import serve

FILL_S = 60.0


class AdapterFiller:
    """Lives in the child; knows what all versions of an adapter have in common."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._common = (b"", b"")

    def expect(self, config: bytes, header: bytes) -> None:
        """Take only adapters with this configuration and this header of their file."""
        self._common = (config, header)

    def fill(self, folder: str, start: int, size: int) -> bool:
        """Read an adapter to bytes `start` and following of the memory; False if it is another kind of adapter.

        Raises:
            BadRequestError: it cannot be read, or is damaged.
        """
        with open_adapter(Path(folder)) as file:
            if (file.config, file.header) != self._common or file.size_bytes != size:
                return False
            with memoryview(self._memory) as memory, memory[start : start + size] as place:
                file.fill(place)
        return True


class FillerProcess:
    """The engine's side: one call at a time."""

    def __init__(self, child: ChildProcess, fill_s: float) -> None:
        self._child, self._fill_s = child, fill_s

    @classmethod
    async def start(cls, descriptor: int, num_bytes: int, config: bytes, header: bytes, fill_s: float) -> FillerProcess:
        """Start a process for memory that it maps by a file's descriptor, and for adapters of one kind.

        Raises:
            ProcessDiedError: it ended at once.
            TimeoutError: it does not answer within `fill_s`.
        """
        argv = ["-m", "agentrl.engine.adapter_filler", str(descriptor), str(num_bytes)]
        filler = cls(await ChildProcess.start("adapter-filler", argv, None, descriptors=[descriptor]), fill_s)
        try:
            await filler._child.call("expect", config, header, result=type(None), deadline_s=fill_s)
        except BaseException:
            filler.kill()
            raise
        return filler

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    async def fill(self, folder: Path, start: int, size: int) -> bool:
        """Have an adapter read; False if it has to be taken apart.

        Waits for: the file. Unblocked by: its end, an error, or the deadline.

        Raises:
            BadRequestError: it cannot be read, or is damaged.
            ProcessDiedError: the process ended.
            TimeoutError: it does not answer; `kill` it.
        """
        try:
            return await self._child.call("fill", str(folder), start, size, result=bool, deadline_s=self._fill_s)
        except RemoteCallError as error:
            if error.error == BadRequestError.__name__:
                raise BadRequestError(error.message) from error
            raise

    def kill(self) -> None:
        """End the process; safe to call twice."""
        self._child.kill()


def main() -> None:
    """Entry of the process: ``python -m agentrl.engine.adapter_filler MEMORY_FD BYTES FD``."""
    memory, num_bytes, descriptor = map(int, sys.argv[1:])
    leave_stopping_to_parent()
    die_with_parent()
    serve(AdapterFiller(mmap.mmap(memory, num_bytes)), descriptor)


if __name__ == "__main__":
    main()
