"""What is on record of a run's steps, by the number of the version that each made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentrl.buffer.group import Group
from agentrl.buffer.recovery import TakenStep, failure_reason, histories_by_group, taken_step
from agentrl.journal.archive_file import archived_steps, read_step
from agentrl.journal.reading import JournalState, read_journal
from agentrl.orchestration.run_directory import RunDirectory
from agentrl.types.episode import Episode
from agentrl.types.errors import ConfigError, StorageError
from agentrl.types.version import PolicyVersion

_UNFINISHED = "unfinished"


def read_steps(run: RunDirectory, policy: str) -> StepRecord:
    """The steps of a policy: those of the journal, and older ones of the archive.

    Raises:
        ConfigError: the run kept no journal.
        StorageError: the journal cannot be read.
    """
    config = run.config()
    if config.journal.kind == "none":
        raise ConfigError(f"{run.path} kept no journal (journal.kind = none): what its steps trained is not on record")
    several = len(config.trained) > 1
    # An archived episode names one step: of several policies the journal alone says what each trained.
    archived = {} if several else archived_steps(run.episodes)
    return StepRecord(policy, read_journal(run.journal), config.buffer.group_size, archived)


class StepRecord:
    """Steps as journal and archive hold them; step n makes the version of step n of the one before it.

    `archived` are the files of steps by number. Of these only what they trained is known, not what their groups lost.
    """

    def __init__(
        self, policy: str, state: JournalState, group_size: int, archived: Mapping[int, Path] | None = None
    ) -> None:
        self.policy = policy
        self._archived = dict(archived or {})
        self._taken = {taken.step + 1: taken for taken in state.taken if taken.policy == policy}
        self._digests = {stepped.step: stepped.digest for stepped in state.stepped if stepped.policy == policy}
        self._by_group = histories_by_group(state.lives.values())
        self._reasons = {name: entry.reason for entry in state.dropped for name in entry.episodes}
        self._group_size = group_size
        self._missing: dict[int, str | None] = {}

    @property
    def numbers(self) -> list[int]:
        """Steps that are on record, whether or not all of their episodes are."""
        return sorted({*self._taken, *self._archived})

    def step(self, number: int) -> TakenStep:
        """What the step trained. Raises StorageError that names what is not on record."""
        if number in self._archived:
            return self._from_archive(number)
        if number not in self._taken:
            raise StorageError(f"what step {number} trained is not on record")
        return taken_step(self._taken[number], self._by_group, self._group_size)

    def missing(self, number: int) -> str | None:
        """Why the step cannot be done again, or None."""
        if number not in self._missing:
            self._missing[number] = self._find_missing(number)
        return self._missing[number]

    def digest(self, number: int) -> str | None:
        """Digest of the weights that the step made; None if the run ended before it was on record."""
        return self._digests.get(number)

    def names(self, number: int) -> list[str]:
        """All episodes of the step's groups, whether it took them or not."""
        if number in self._archived:
            return sorted(e.episode_id for group in self.step(number).groups for e in group.episodes)
        groups = [group for group, _ in self._taken[number].groups]
        return sorted(history.ticket.episode_id for group in groups for history in self._by_group.get(group, []))

    def left_out(self, number: int) -> list[tuple[int, Episode, str]]:
        """Members of the step's groups that it did not take: place of the group in the step, episode, reason."""
        found: list[tuple[int, Episode, str]] = []
        if number in self._archived:
            return found
        for place, (group, names) in enumerate(self._taken[number].groups):
            for history in self._by_group.get(group, []):
                name = history.ticket.episode_id
                if name in names:
                    continue
                reason = _UNFINISHED if history.ended is None else failure_reason(history.episode())
                found.append((place, history.episode(), self._reasons.get(name, reason)))
        return found

    def _from_archive(self, number: int) -> TakenStep:
        groups: dict[int, Group] = {}
        episodes = read_step(self._archived[number], number)
        for episode in episodes:
            ticket = episode.ticket
            group = groups.setdefault(
                ticket.group, Group(ticket.group, ticket.task, self._group_size, {self.policy: 0})
            )
            group.episodes.append(episode)
        return TakenStep(self.policy, PolicyVersion(0, number - 1), tuple(groups.values()))

    def _find_missing(self, number: int) -> str | None:
        try:
            self.step(number)
        except StorageError as error:
            return str(error)
        return None
