"""What the buffer puts on record: which steps took what, which episodes will never be trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from agentrl.buffer.group import Group
from agentrl.journal.entries import Checkpointed, Dropped, Stepped, Taken, pack
from agentrl.journal.writer import JournalWriter
from agentrl.types.version import PolicyVersion


class StepJournal(Protocol):
    """Hears what becomes of episodes once they are over."""

    async def taken(self, versions: Mapping[str, PolicyVersion], groups: Sequence[Group]) -> None:
        """A step is about to train these groups; returns once that is durable."""

    async def stepped(self, versions: Mapping[str, PolicyVersion], digests: Mapping[str, str]) -> None:
        """The step is done; returns once that is durable, and only then may anybody see its weights."""

    def dropped(self, group: Group, episodes: Iterable[str], reason: str) -> None:
        """A whole group will not be trained; durable before anything that follows from it."""

    def begin_checkpoint(self) -> None:
        """Start a checkpoint: what is dropped from here on belongs to the next one."""

    async def settled(self) -> None:
        """Returns once all that was dropped before `begin_checkpoint` is durable."""

    async def checkpointed(self, step: int) -> None:
        """A checkpoint holds every step up to this one."""


class NoStepJournal:
    """Keeps nothing."""

    async def taken(self, versions: Mapping[str, PolicyVersion], groups: Sequence[Group]) -> None:
        """Nothing outlives the process."""

    async def stepped(self, versions: Mapping[str, PolicyVersion], digests: Mapping[str, str]) -> None:
        """Nothing outlives the process."""

    def dropped(self, group: Group, episodes: Iterable[str], reason: str) -> None:
        """Nothing outlives the process."""

    def begin_checkpoint(self) -> None:
        """Nothing outlives the process but the checkpoint."""

    async def settled(self) -> None:
        """Nothing outlives the process but the checkpoint."""

    async def checkpointed(self, step: int) -> None:
        """Nothing outlives the process but the checkpoint."""


class BufferJournal:
    """Writes to the buffer's own journal."""

    def __init__(self, writer: JournalWriter) -> None:
        self.writer = writer
        self._held: list[Dropped] | None = None

    async def taken(self, versions: Mapping[str, PolicyVersion], groups: Sequence[Group]) -> None:
        """Which groups, and in them which episodes, in the order of the batch. Raises StorageError."""
        for group in groups:
            self._note_failed(group)
        named = tuple((group.number, tuple(e.episode_id for e in group.ordered())) for group in groups)
        await self.writer.append(*pack(None, Taken(dict(versions), named)))

    async def stepped(self, versions: Mapping[str, PolicyVersion], digests: Mapping[str, str]) -> None:
        """The versions that the step made, and digests of their weights. Raises StorageError."""
        await self.writer.append(*pack(None, Stepped(dict(versions), dict(digests))))

    def dropped(self, group: Group, episodes: Iterable[str], reason: str) -> None:
        """A whole group. Raises StorageError if an earlier entry could not be written."""
        self._note_failed(group)
        entry = Dropped(group.number, tuple(episodes), reason, group.started_step, whole=True)
        self._note(entry)

    def _note_failed(self, group: Group) -> None:
        """Failed members are done with when their group is: until then their attempts must be known."""
        if group.failed:
            self._note(Dropped(group.number, tuple(group.failed), "failed", group.started_step))

    def begin_checkpoint(self) -> None:
        """Hold back what is dropped until the checkpoint is on record.

        In front of it an entry would be final, and its episodes could be pruned, while neither the checkpoint's
        frontier nor its part of the ledger knows of them.
        """
        self._held = []

    async def settled(self) -> None:
        """Wait for what was dropped before `begin_checkpoint`. Raises StorageError.

        The checkpoint has these on its ledger, so a resume does not drop them again: if they were not on record, no
        later checkpoint would make them final, and their segments would never be deleted.
        """
        await self.writer.flush()

    async def checkpointed(self, step: int) -> None:
        """What is before this checkpoint is final. Raises StorageError."""
        await self.writer.append(*pack(None, Checkpointed(step)))
        held, self._held = self._held or [], None
        for entry in held:
            self._note(entry)

    def _note(self, entry: Dropped) -> None:
        if self._held is not None:
            self._held.append(entry)
        else:
            self.writer.note(*pack(None, entry))
