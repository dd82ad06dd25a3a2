"""What a journal means for a buffer: which groups live on, which steps are to be redone, who still plays."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from agentrl.buffer.group import Group
from agentrl.journal.entries import Dropped, Taken
from agentrl.journal.history import EpisodeHistory
from agentrl.journal.reading import JournalState
from agentrl.types.episode import Episode, Ticket
from agentrl.types.errors import StorageError
from agentrl.types.version import PolicyVersion


@dataclass(frozen=True, slots=True)
class TakenStep:
    """A step whose batch is on record: it is done again with the same groups in the same order.

    `versions` are those that it trained; step v makes v+1.
    """

    versions: dict[str, PolicyVersion]
    groups: tuple[Group, ...]

    @property
    def step(self) -> int:
        """The step of the versions that it trained."""
        return min(version.step for version in self.versions.values())


@dataclass(frozen=True, slots=True)
class Recovered:
    """Everything that a buffer goes on from, beside a checkpoint's frontier.

    `groups` live: members may be missing or in flight. `running` are the tickets in flight. `failed` are episodes
    that failed, with the step at which their group began. `dropped` are groups that no step will take.
    """

    redo: tuple[TakenStep, ...] = ()
    groups: tuple[Group, ...] = ()
    running: tuple[Ticket, ...] = ()
    failed: tuple[tuple[Episode, int], ...] = ()
    dropped: tuple[tuple[Dropped, tuple[Episode, ...]], ...] = ()


def recover(
    state: JournalState,
    checkpoint_step: int,
    group_size: int,
    max_attempts: int,
    in_ledger: Collection[str] = (),
    is_salvaged: bool = False,
) -> Recovered:
    """Sort what the journals hold into what a buffer goes on from.

    Args:
        state: what the journals say.
        checkpoint_step: the step that trainer and frontier go on from; 0 without a checkpoint.
        group_size: members of a group.
        max_attempts: times that a member is dispatched.
        in_ledger: names of episodes whose end is on the ledger already.
        is_salvaged: entries may be missing. Steps are then redone up to the first that is not whole on record.

    Raises:
        StorageError: steps behind the checkpoint, or episodes of theirs, are missing.
    """
    by_group = lives_by_group(state.lives.values())
    final = {number for taken in state.taken if taken.step < checkpoint_step for number, _ in taken.groups}
    redo = _taken_steps(state, checkpoint_step, by_group, group_size, is_salvaged)
    gone = {group.number for step in redo for group in step.groups}
    dropped = [entry for entry in state.dropped if entry.whole and entry.group in by_group]
    # Of a group whose scored episodes are on the ledger a checkpoint knows, even if its drop is not on record.
    settled = {life.ticket.group for life in state.lives.values() if _is_settled(life, in_ledger)}
    gone |= {entry.group for entry in dropped} | final | settled
    alive = [_revive(by_group[n], group_size, max_attempts) for n in sorted(by_group) if n not in gone]
    return Recovered(
        redo=tuple(redo),
        groups=tuple(alive),
        running=tuple(ticket for group in alive for ticket in _in_flight(group, by_group[group.number])),
        failed=tuple(
            (life.episode(), _started(lives))
            for number, lives in sorted(by_group.items())
            for life in _in_order(lives)
            if _has_failed(life) and life.ticket.episode_id not in in_ledger
        ),
        dropped=tuple(
            (
                entry,
                tuple(state.lives[name].episode() for name in entry.episodes if name in state.lives.keys() - in_ledger),
            )
            for entry in dropped
        ),
    )


def lives_by_group(lives: Iterable[EpisodeHistory]) -> dict[int, list[EpisodeHistory]]:
    """Lives by the number of their group."""
    by_group: dict[int, list[EpisodeHistory]] = {}
    for life in lives:
        by_group.setdefault(life.ticket.group, []).append(life)
    return by_group


def succeeded(episode: Episode) -> bool:
    """Whether an episode has an outcome that a group can use."""
    return episode.failure is None and episode.reward is not None


def failure_reason(episode: Episode) -> str:
    """Why a failed episode is not trained, as the ledger says it."""
    failure = episode.failure
    return f"{failure.boundary}_{failure.kind}" if failure else "not_scored"


def _taken_steps(
    state: JournalState,
    checkpoint_step: int,
    by_group: Mapping[int, list[EpisodeHistory]],
    group_size: int,
    is_salvaged: bool,
) -> list[TakenStep]:
    """Steps behind the checkpoint, in order and without a gap."""
    # Of a step that was taken twice, by a process that had been replaced, the last counts, as it does for the archive.
    last = {taken.step: taken for taken in state.taken if taken.step >= checkpoint_step}
    steps = [last[step] for step in sorted(last)]
    for expected, taken in enumerate(steps, checkpoint_step):
        if taken.step != expected and is_salvaged:
            steps = steps[: expected - checkpoint_step]
            break
        if taken.step != expected:
            raise StorageError(
                f"the journal goes on with step {taken.step}, the newest checkpoint is of step {checkpoint_step}: "
                f"what step {expected} trained is not on record. Put the missing checkpoint or journal segments back"
            )
    found: list[TakenStep] = []
    for taken in steps:
        try:
            found.append(taken_step(taken, by_group, group_size))
        except StorageError:
            if not is_salvaged:
                raise
            break
    return found


def taken_step(taken: Taken, by_group: Mapping[int, list[EpisodeHistory]], group_size: int) -> TakenStep:
    """The step with its groups, from the lives of each group. Raises StorageError if one that it took is missing."""
    return TakenStep(
        taken.versions,
        tuple(_as_taken(number, names, by_group.get(number, []), group_size) for number, names in taken.groups),
    )


def _as_taken(number: int, names: Iterable[str], lives: list[EpisodeHistory], group_size: int) -> Group:
    """A group with exactly the episodes that a step took."""
    by_name = {life.ticket.episode_id: life for life in lives}
    missing = [n for n in names if n not in by_name or by_name[n].ended is None or _has_failed(by_name[n])]
    if missing or not lives:
        raise StorageError(f"a step took episodes of group {number} that are not on record as ended: {missing}")
    group = Group(number, lives[0].ticket.task, group_size, _started(lives), num_dispatched=group_size)
    group.episodes = [by_name[name].episode() for name in names]
    group.failed = [life.ticket.episode_id for life in _in_order(lives) if _has_failed(life)]
    return group


def _revive(lives: list[EpisodeHistory], group_size: int, max_attempts: int) -> Group:
    """A group that no step has taken: who is in it, who plays, who is to be dispatched."""
    newest = {life.ticket.member: life for life in _in_order(lives)}  # of several attempts the last
    known = 1 + max(newest)
    group = Group(lives[0].ticket.group, lives[0].ticket.task, group_size, _started(lives), num_dispatched=known)
    group.failed = [life.ticket.episode_id for life in _in_order(lives) if _has_failed(life)]
    for member in range(known):
        if member not in newest:  # its lease was lost while a later one of its group was not
            group.redispatch.append((member, 0))
            continue
        life, attempt = newest[member], newest[member].ticket.attempt
        if life.ended is None:
            group.in_flight.add((member, attempt))
        elif not _has_failed(life):
            group.episodes.append(life.episode())
        elif attempt + 1 < max_attempts:
            group.redispatch.append((member, attempt + 1))
    return group


def _in_flight(group: Group, lives: list[EpisodeHistory]) -> list[Ticket]:
    tickets = [life.ticket for life in _in_order(lives)]
    return [ticket for ticket in tickets if (ticket.member, ticket.attempt) in group.in_flight]


def _in_order(lives: Iterable[EpisodeHistory]) -> list[EpisodeHistory]:
    return sorted(lives, key=lambda life: (life.ticket.member, life.ticket.attempt))


def _is_settled(life: EpisodeHistory, in_ledger: Collection[str]) -> bool:
    """Whether a scored episode reached the ledger, as it does only with its whole group."""
    return life.ended is not None and not _has_failed(life) and life.ticket.episode_id in in_ledger


def _has_failed(life: EpisodeHistory) -> bool:
    return life.ended is not None and (life.ended.failure is not None or life.ended.reward is None)


def _started(lives: Iterable[EpisodeHistory]) -> int:
    """The step of the weights that a group began with."""
    return min(version.step for life in lives for version in life.ticket.started_at.values())
