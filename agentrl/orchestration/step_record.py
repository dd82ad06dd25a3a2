"""What is on record of a run's steps, by the number of the version that each made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentrl.buffer.group import Group
from agentrl.buffer.recovery import TakenStep, failure_reason, lives_by_group, taken_step
from agentrl.journal.archive_file import archived_steps, read_step
from agentrl.journal.reading import JournalState, read_journal
from agentrl.orchestration.run_directory import RunDirectory
from agentrl.types.episode import Episode
from agentrl.types.errors import ConfigError, StorageError
from agentrl.types.version import PolicyVersion

_UNFINISHED = "unfinished"


def read_steps(run: RunDirectory) -> StepRecord:
    """The steps of a run: those of the journal, and older ones of the archive.

    Raises:
        ConfigError: the run kept no journal.
        StorageError: the journal cannot be read.
    """
    config = run.config()
    if config.journal.kind == "none":
        raise ConfigError(f"{run.path} kept no journal (journal.kind = none): what its steps trained is not on record")
    return StepRecord(read_journal(run.journal), config.buffer.group_size, archived_steps(run.path / "episodes"))


class StepRecord:
    """Steps as journal and archive hold them; step n makes the version of step n of the one before it.

    `archived` are the files of steps by number. Of these only what they trained is known, not what their groups lost.
    """

    def __init__(self, state: JournalState, group_size: int, archived: Mapping[int, Path] | None = None) -> None:
        self._archived = dict(archived or {})
        self._taken = {taken.step + 1: taken for taken in state.taken}
        self._digests = {stepped.step: stepped.digests for stepped in state.stepped}
        self._by_group = lives_by_group(state.lives.values())
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

    def digest(self, number: int, policy: str) -> str | None:
        """Digest of the weights that the step made; None if the run ended before it was on record."""
        return self._digests.get(number, {}).get(policy)

    def names(self, number: int) -> list[str]:
        """All episodes of the step's groups, whether it took them or not."""
        if number in self._archived:
            return sorted(e.episode_id for group in self.step(number).groups for e in group.episodes)
        groups = [group for group, _ in self._taken[number].groups]
        return sorted(life.ticket.episode_id for group in groups for life in self._by_group.get(group, []))

    def left_out(self, number: int) -> list[tuple[int, Episode, str]]:
        """Members of the step's groups that it did not take: place of the group in the step, episode, reason."""
        found: list[tuple[int, Episode, str]] = []
        if number in self._archived:
            return found
        for place, (group, names) in enumerate(self._taken[number].groups):
            for life in self._by_group.get(group, []):
                name = life.ticket.episode_id
                if name in names:
                    continue
                reason = _UNFINISHED if life.ended is None else failure_reason(life.episode())
                found.append((place, life.episode(), self._reasons.get(name, reason)))
        return found

    def _from_archive(self, number: int) -> TakenStep:
        groups: dict[int, Group] = {}
        episodes = read_step(self._archived[number], number)
        for episode in episodes:
            ticket = episode.ticket
            group = groups.setdefault(ticket.group, Group(ticket.group, ticket.task, self._group_size, 0))
            group.episodes.append(episode)
        policies = {agent.policy for agent in episodes[0].agents}
        return TakenStep(dict.fromkeys(sorted(policies), PolicyVersion(0, number - 1)), tuple(groups.values()))

    def _find_missing(self, number: int) -> str | None:
        try:
            self.step(number)
        except StorageError as error:
            return str(error)
        return None
