"""A process that archives and compacts, so that neither takes turns with the event loop of the rollouts.

It is started for the first checkpoint and has the lowest priority: it takes what engines, trainer and rollouts leave.
Nothing depends on it in time, since what it has not moved is moved behind a later checkpoint, or at the run's end.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.journal.claim import Claim
from agentrl.process.parent import CHILD
from agentrl.process.remote import ChildProcess, ProcessDiedError, RemoteCallError
from agentrl.process.server import serve
from agentrl.types.errors import StorageError

if TYPE_CHECKING:
    from agentrl.journal.index import JournalIndex

_log = logging.getLogger(__name__)
# At its priority it has one part in seventy of a processor that is never idle, where a minute of work takes an hour.
DEADLINE_S = 3600.0
_NICENESS = 19
# Rows are made by ten thousands and nothing in them refers back: to look for cycles among them takes a third of the
# work, at the usual threshold of 700.
_OBJECTS_BETWEEN_COLLECTIONS = 50_000


class Archiver:
    """Lives in the child."""

    def move(self, folder: str, token: int, target: str, keep_bytes: int) -> None:
        """Archive what is final, then compact the segments. Raises StorageError."""
        from agentrl.journal.compaction import compact

        claim = Claim(Path(folder), token)
        journal = self._archive(claim, Path(target), keep_bytes)
        claim.check()
        deleted = compact(journal, token)
        _log.info("%d segments deleted; %.3f s of processor time since the start", deleted, time.process_time())

    def archive(self, folder: str, token: int, target: str, keep_bytes: int) -> None:
        """Archive what is final. Raises StorageError."""
        self._archive(Claim(Path(folder), token), Path(target), keep_bytes)

    def _archive(self, claim: Claim, target: Path, keep_bytes: int) -> JournalIndex:
        # Parquet's library takes a while to load, and the process should be there at once.
        from agentrl.journal.archive import archive
        from agentrl.journal.index import JournalIndex

        claim.check()
        journal = JournalIndex(claim.folder)
        archived = archive(journal, target, keep_bytes)
        _log.info("%d episodes archived", archived.episodes)
        return journal


@dataclass(slots=True)
class ArchiverProcess:
    """The run's side of an archiver: one call at a time, in the background.

    `log` is the output of the `child`, which is started with the first call.
    """

    claim: Claim
    target: Path
    log: Path
    keep_bytes: int
    deadline_s: float = DEADLINE_S
    child: ChildProcess | None = None
    _moving: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no call is in hand."""
        return self._moving is None or self._moving.done()

    def begin(self) -> None:
        """Move what is final by now, unless an earlier call is still at it.

        Raises:
            StorageError: the earlier call failed.
        """
        if not self.is_idle:
            return  # what is not moved now is with the next checkpoint
        if self._moving is not None:
            self._moving.result()
        self._moving = asyncio.create_task(self._call("move"), name="archive")

    async def settled(self) -> None:
        """Wait for the call in hand.

        Waits for: the child. Unblocked by: its answer, its end, or the call's deadline.

        Raises:
            StorageError: the call failed.
        """
        moving, self._moving = self._moving, None
        if moving is not None:
            await moving

    async def archive(self) -> None:
        """Archive all that is final by now, and leave the segments as they are.

        Waits for: the call in hand, then the child. Unblocked by: its answer, its end, or the call's deadline.

        Raises:
            StorageError: one of the two calls failed.
        """
        await self.settled()
        await self._call("archive")

    async def close(self) -> None:
        """Wait for the call in hand and let the child end; safe to call twice.

        Waits for: the child. Unblocked by: its answer, its end, or the call's deadline.

        Raises:
            StorageError: the call failed.
        """
        try:
            await self.settled()
        finally:
            child, self.child = self.child, None
            if child is not None:
                await child.close()

    async def _call(self, name: str) -> None:
        try:
            if self.child is None:
                self.child = await ChildProcess.start("archiver", [*CHILD, "agentrl.journal.archiver"], self.log)
            arguments = (str(self.claim.folder), self.claim.token, str(self.target), self.keep_bytes)
            await self.child.call(name, *arguments, result=type(None), deadline_s=self.deadline_s)
        except RemoteCallError as error:
            message = error.message if error.error == StorageError.__name__ else f"{error}; see {self.log}"
            raise StorageError(message) from error
        except TimeoutError:
            self._kill()
            raise StorageError(
                f"consumed episodes are not in the archive {self.target} after {self.deadline_s:g} s; {_NOTHING_LOST}"
            ) from None
        except (ProcessDiedError, OSError) as error:
            raise StorageError(f"{error}\n{_NOTHING_LOST}") from error
        except asyncio.CancelledError:
            self._kill()
            raise

    def _kill(self) -> None:
        if self.child is not None:
            self.child.kill()


_NOTHING_LOST = "nothing is lost, `agentrl resume` archives what was left; see to memory and disk if this comes again"


def main() -> None:
    """Entry of the process: ``python -m agentrl.journal.archiver FD``."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    os.nice(_NICENESS)
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    serve(Archiver(), int(sys.argv[1]))


if __name__ == "__main__":
    main()
