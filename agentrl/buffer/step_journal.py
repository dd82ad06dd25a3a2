"""What the buffer puts on record: which steps took what, which episodes will never be trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from agentrl.buffer.group import Group
from agentrl.journal.entries import NO_HOLDER, Checkpointed, Dropped, LeftOut, Scored, Stepped, Taken, TurnScored, pack
from agentrl.journal.writer import JournalWriter
from agentrl.types.environment import ScoreRecord
from agentrl.types.turn_score import TurnScore
from agentrl.types.version import PolicyVersion


class StepJournal(Protocol):
    """Hears what becomes of episodes once they are over."""

    async def taken(self, policy: str, version: PolicyVersion, groups: Sequence[Group]) -> None:
        """The policy's step is about to train these groups; returns once that is durable."""

    async def stepped(self, policy: str, version: PolicyVersion, digest: str) -> None:
        """The step is done; returns once that is durable, and only then may anybody see its weights."""

    def dropped(self, group: Group, episodes: Iterable[str], reason: str) -> None:
        """No policy will train a group; durable before anything that follows from it."""

    def left_out(self, group: Group, policy: str, reason: str) -> None:
        """One policy will not train a group that others do; durable before anything that follows from it."""

    def failed(self, group: Group) -> None:
        """All policies are done with a group that some have trained: its failed attempts need not be known longer."""

    async def scored(self, episode_id: str, record: ScoreRecord) -> None:
        """An episode that was played before has got a score; returns once that is durable."""

    async def turns_scored(self, scorer: str, scores: Sequence[TurnScore]) -> None:
        """A scorer has judged some turns; returns once that is durable."""

    def begin_checkpoint(self) -> None:
        """Start a checkpoint: what is dropped from here on belongs to the next one."""

    async def settled(self) -> None:
        """Returns once all that was dropped before `begin_checkpoint` is durable."""

    async def checkpointed(self, steps: Mapping[str, int]) -> None:
        """A checkpoint holds every step up to these, by policy."""

    async def over(self, ends: Sequence[Dropped | LeftOut], steps: Mapping[str, int]) -> None:
        """The run has made its last steps, which are these: what no step took ends like this."""


class NoStepJournal:
    """Keeps nothing."""

    async def taken(self, policy: str, version: PolicyVersion, groups: Sequence[Group]) -> None:
        """Nothing outlives the process."""

    async def stepped(self, policy: str, version: PolicyVersion, digest: str) -> None:
        """Nothing outlives the process."""

    def dropped(self, group: Group, episodes: Iterable[str], reason: str) -> None:
        """Nothing outlives the process."""

    def left_out(self, group: Group, policy: str, reason: str) -> None:
        """Nothing outlives the process."""

    def failed(self, group: Group) -> None:
        """Nothing outlives the process."""

    async def scored(self, episode_id: str, record: ScoreRecord) -> None:
        """Nothing outlives the process."""

    async def turns_scored(self, scorer: str, scores: Sequence[TurnScore]) -> None:
        """Nothing outlives the process."""

    def begin_checkpoint(self) -> None:
        """Nothing outlives the process but the checkpoint."""

    async def settled(self) -> None:
        """Nothing outlives the process but the checkpoint."""

    async def checkpointed(self, steps: Mapping[str, int]) -> None:
        """Nothing outlives the process but the checkpoint."""

    async def over(self, ends: Sequence[Dropped | LeftOut], steps: Mapping[str, int]) -> None:
        """Nothing outlives the process but the checkpoint."""


class BufferJournal:
    """Writes to the buffer's own journal."""

    def __init__(self, writer: JournalWriter) -> None:
        self.writer = writer
        self._held: list[Dropped | LeftOut] | None = None

    async def taken(self, policy: str, version: PolicyVersion, groups: Sequence[Group]) -> None:
        """Which groups, and in them which episodes, in the order of the batch. Raises StorageError."""
        named = tuple((group.number, tuple(e.episode_id for e in group.ordered())) for group in groups)
        policies = tuple(group.policies for group in groups)
        await self.writer.append(*pack(None, Taken(policy, version, named, policies)))

    async def stepped(self, policy: str, version: PolicyVersion, digest: str) -> None:
        """The version that the step made, and a digest of its weights. Raises StorageError."""
        await self.writer.append(*pack(None, Stepped(policy, version, digest)))

    def dropped(self, group: Group, episodes: Iterable[str], reason: str) -> None:
        """A whole group. Raises StorageError if an earlier entry could not be written."""
        self.failed(group)
        entry = Dropped(group.number, tuple(episodes), reason, group.started_step, whole=True)
        self._note(entry)

    def left_out(self, group: Group, policy: str, reason: str) -> None:
        """One policy's part in a group. Raises StorageError if an earlier entry could not be written."""
        names = tuple(episode.episode_id for episode in group.ordered())
        self._note(LeftOut(policy, group.number, names, reason, group.policies))

    def failed(self, group: Group) -> None:
        """The failed attempts of a group. Raises StorageError if an earlier entry could not be written.

        Any checkpoint makes that final, and nobody knows of them from then on: a group that is still waited for would
        have their members played anew.
        """
        for reason in dict.fromkeys(group.failed.values()):
            names = tuple(name for name, of_episode in group.failed.items() if of_episode == reason)
            self._note(Dropped(group.number, names, reason, group.started_step))

    async def scored(self, episode_id: str, record: ScoreRecord) -> None:
        """A score that came behind the end of play. Raises StorageError."""
        await self.writer.append(*pack(episode_id, Scored(NO_HOLDER, record)))

    async def turns_scored(self, scorer: str, scores: Sequence[TurnScore]) -> None:
        """What a scorer said of some turns, in one write. Raises StorageError."""
        for score in scores:
            self.writer.note(*pack(score.key.episode_id, TurnScored(NO_HOLDER, scorer, score)))
        await self.writer.flush()

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

    async def checkpointed(self, steps: Mapping[str, int]) -> None:
        """What is before this checkpoint is final. Raises StorageError."""
        await self.writer.append(*pack(None, Checkpointed(dict(steps))))
        held, self._held = self._held or [], None
        for entry in held:
            self._note(entry)

    async def over(self, ends: Sequence[Dropped | LeftOut], steps: Mapping[str, int]) -> None:
        """All of the run is final with this. Raises StorageError."""
        for entry in ends:
            self._note(entry)
        await self.checkpointed(steps)

    def _note(self, entry: Dropped | LeftOut) -> None:
        if self._held is not None:
            self._held.append(entry)
        else:
            self.writer.note(*pack(None, entry))
