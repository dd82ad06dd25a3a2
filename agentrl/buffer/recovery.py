"""What a journal means for a buffer: which groups live on, which steps are to be redone, who still plays."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from agentrl.buffer.group import Group
from agentrl.journal.entries import Dropped, Taken
from agentrl.journal.history import EpisodeHistory
from agentrl.journal.reading import JournalState
from agentrl.types.episode import Episode, Ticket
from agentrl.types.errors import StorageError
from agentrl.types.version import PolicyVersion


@dataclass(frozen=True, slots=True)
class TakenStep:
    """A policy's step whose batch is on record: it is done again with the same groups in the same order.

    `version` is the one that it trained; step v makes v+1.
    """

    policy: str
    version: PolicyVersion
    groups: tuple[Group, ...]

    @property
    def step(self) -> int:
        """The step of the version that it trained."""
        return self.version.step


@dataclass(frozen=True, slots=True)
class Recovered:
    """Everything that a buffer goes on from, beside a checkpoint's frontiers.

    `redo` has the steps of each policy. `groups` are those that some policy is not done with: members may be missing
    or in flight; one that a step redoes is the same object there. `trained` has by a group's number the versions at
    which policies took it whose checkpoints hold that. `running` are the tickets in flight, `unscored` episodes that
    were played to their end and wait for a score. `failed` are episodes that failed, with the step at which their group
    began. `dropped` are groups that no step will take.
    """

    redo: dict[str, tuple[TakenStep, ...]] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    trained: dict[int, dict[str, PolicyVersion]] = field(default_factory=dict)
    running: tuple[Ticket, ...] = ()
    unscored: tuple[Episode, ...] = ()
    failed: tuple[tuple[Episode, int], ...] = ()
    dropped: tuple[tuple[Dropped, tuple[Episode, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class RecoveryTerms:
    """What a recovery must know of the run.

    `checkpoint` has the step of each trained policy's newest checkpoint; `policies` who trains on an environment, and
    `scorers` whose scores its episodes need, by its name.
    """

    checkpoint: Mapping[str, int]
    policies: Mapping[str, tuple[str, ...]]
    scorers: Mapping[str, tuple[str, ...]]
    group_size: int
    max_attempts: int
    forks: int = 0

    def is_unscored(self, history: EpisodeHistory) -> bool:
        """Whether an episode was played to its end and still waits for a score."""
        return bool(history.missing(self.scorers[history.ticket.environment]))

    def has_failed(self, history: EpisodeHistory) -> bool:
        """Whether an episode ended without an outcome, and none can come any more."""
        return history.has_failed and not self.is_unscored(history)


def recover(
    state: JournalState, terms: RecoveryTerms, in_ledger: Collection[str] = (), is_salvaged: bool = False
) -> Recovered:
    """Sort what the journals hold into what a buffer goes on from.

    Args:
        state: what the journals say.
        terms: the run's.
        in_ledger: names of episodes whose end is on the ledger already.
        is_salvaged: entries may be missing. Steps are then redone up to the first that is not whole on record.

    Raises:
        StorageError: steps behind the checkpoint, or episodes of theirs, are missing.
    """
    by_group = histories_by_group(state.lives.values())
    dropped = [entry for entry in state.dropped if entry.whole and entry.group in by_group]
    # Of a group whose scored episodes are on the ledger a checkpoint knows, even if its drop is not on record.
    gone = {history.ticket.group for history in state.lives.values() if _is_settled(history, terms, in_ledger)}
    gone |= {entry.group for entry in dropped}
    covered, taken = _taken_steps(state, terms.checkpoint, is_salvaged)
    alive = {number: _revive(by_group[number], terms) for number in sorted(by_group) if number not in gone}
    trained: dict[int, dict[str, PolicyVersion]] = {}
    for step in covered:
        for number, names in step.groups:
            if number in alive:
                trained.setdefault(number, {})[step.policy] = step.version
                alive[number].trained_by[step.policy] = step.version.step + 1
                _complete(alive[number], [e for e in alive[number].episodes if e.episode_id in names])
    for entry in state.left_out:
        if entry.group in alive:
            alive[entry.group].left_out[entry.policy] = entry.reason
    redo = _redone(taken, alive, by_group, terms.group_size, is_salvaged)
    for group in alive.values():
        group.waits_for -= group.trained_by.keys() | group.left_out.keys()
    groups = tuple(alive.values())
    in_flight = [history for group in groups for history in _in_flight(group, by_group[group.number])]
    return Recovered(
        redo=redo,
        groups=groups,
        trained=trained,
        running=tuple(h.ticket for h in in_flight if h.ended is None),
        unscored=tuple(h.episode() for h in in_flight if h.ended is not None),
        failed=tuple(
            (history.episode(), _started(histories))
            for number, histories in sorted(by_group.items())
            for history in _in_order(histories)
            if terms.has_failed(history) and history.ticket.episode_id not in in_ledger
        ),
        dropped=tuple(
            (
                entry,
                tuple(state.lives[name].episode() for name in entry.episodes if name in state.lives.keys() - in_ledger),
            )
            for entry in dropped
        ),
    )


def histories_by_group(histories: Iterable[EpisodeHistory]) -> dict[int, list[EpisodeHistory]]:
    """Histories by the number of their group."""
    by_group: dict[int, list[EpisodeHistory]] = {}
    for history in histories:
        by_group.setdefault(history.ticket.group, []).append(history)
    return by_group


def succeeded(episode: Episode) -> bool:
    """Whether an episode has an outcome that a group can use."""
    return episode.failure is None and episode.reward is not None


def failure_reason(episode: Episode) -> str:
    """Why a failed episode is not trained, as the ledger says it."""
    failure = episode.failure
    return f"{failure.boundary}_{failure.kind}" if failure else "not_scored"


def _taken_steps(
    state: JournalState, checkpoint: Mapping[str, int], is_salvaged: bool
) -> tuple[list[Taken], list[Taken]]:
    """The steps that a checkpoint holds, as far as they are still there; and those behind it, without a gap."""
    covered: list[Taken] = []
    # Of a step that was taken twice, by a process that had been replaced, the last counts, as it does for the archive.
    last = {(entry.policy, entry.step): entry for entry in state.taken}
    steps: list[Taken] = []
    for policy, step in sorted(last):
        entry, first = last[policy, step], checkpoint.get(policy, 0)
        if step < first:
            covered.append(entry)
            continue
        expected = first + sum(other.policy == policy for other in steps)
        if step == expected:
            steps.append(entry)
        elif not is_salvaged:
            raise StorageError(
                f"the journal goes on with step {step} of policy '{policy}', the newest checkpoint is of step {first}: "
                f"what step {expected} trained is not on record"
            )
    return covered, steps


def _redone(
    steps: Iterable[Taken],
    alive: dict[int, Group],
    by_group: Mapping[int, list[EpisodeHistory]],
    group_size: int,
    is_salvaged: bool,
) -> dict[str, tuple[TakenStep, ...]]:
    """The steps by policy, with groups that they share with those alive; of a salvage those before the first gap."""
    found: dict[str, list[TakenStep]] = {}
    broken: set[str] = set()
    for taken in steps:
        if taken.policy in broken:
            continue
        try:
            step = taken_step(taken, by_group, group_size)
        except StorageError:
            if not is_salvaged:
                raise
            broken.add(taken.policy)
            continue
        groups = tuple(_same(alive, group) for group in step.groups)
        found.setdefault(taken.policy, []).append(replace(step, groups=groups))
    return {policy: tuple(steps) for policy, steps in found.items()}


def _same(alive: dict[int, Group], taken: Group) -> Group:
    """The group that is alive, with exactly the episodes that a step took."""
    group = alive.get(taken.number, taken)
    _complete(group, taken.episodes)
    return group


def _complete(group: Group, episodes: list[Episode]) -> None:
    """Nothing more comes of a group that some step took."""
    group.episodes, group.num_dispatched = episodes, group.size
    group.in_flight.clear()
    group.redispatch.clear()


def taken_step(taken: Taken, by_group: Mapping[int, list[EpisodeHistory]], group_size: int) -> TakenStep:
    """The step with its groups, from the histories of each. Raises StorageError if one that it took is missing."""
    return TakenStep(
        taken.policy,
        taken.version,
        tuple(_as_taken(number, names, by_group.get(number, []), group_size) for number, names in taken.groups),
    )


def _as_taken(number: int, names: Iterable[str], histories: list[EpisodeHistory], group_size: int) -> Group:
    """A group with exactly the episodes that a step took."""
    by_name = {history.ticket.episode_id: history for history in histories}
    missing = [n for n in names if n not in by_name or by_name[n].ended is None or by_name[n].has_failed]
    if missing or not histories:
        raise StorageError(f"a step took episodes of group {number} that are not on record as ended: {missing}")
    ticket = histories[0].ticket
    started = {policy: version.step for policy, version in _versions(histories).items()}
    group = Group(number, ticket.task, group_size, started, ticket.environment, num_dispatched=group_size)
    group.episodes = [by_name[name].episode() for name in names]
    group.failed = _failed(history for history in histories if history.ended is not None and history.has_failed)
    return group


def _revive(histories: list[EpisodeHistory], terms: RecoveryTerms) -> Group:
    """A group as its episodes' histories leave it: who is in it, who plays, who is to be dispatched."""
    newest = {history.ticket.member: history for history in _in_order(histories)}  # of several attempts the last
    known, ticket = 1 + max(newest), histories[0].ticket
    policies = terms.policies[ticket.environment]
    versions = _versions(histories)
    started = {policy: versions[policy].step for policy in policies}
    group = Group(ticket.group, ticket.task, terms.group_size, started, ticket.environment, known, forks=terms.forks)
    group.waits_for = set(policies)
    group.failed = _failed(history for history in histories if terms.has_failed(history))
    for member in range(known):
        if member not in newest:  # its lease was lost while a later one of its group was not
            group.redispatch.append((member, 0))
            continue
        history, attempt = newest[member], newest[member].ticket.attempt
        if history.ended is None or terms.is_unscored(history):
            group.in_flight.add((member, attempt))
        elif not history.has_failed:
            group.episodes.append(history.episode())
        elif attempt + 1 < terms.max_attempts:
            group.redispatch.append((member, attempt + 1))
    return group


def _failed(histories: Iterable[EpisodeHistory]) -> dict[str, str]:
    """Why these are not trained, by name, in order."""
    return {history.ticket.episode_id: failure_reason(history.episode()) for history in _in_order(histories)}


def _in_flight(group: Group, histories: list[EpisodeHistory]) -> list[EpisodeHistory]:
    return [h for h in _in_order(histories) if (h.ticket.member, h.ticket.attempt) in group.in_flight]


def _in_order(histories: Iterable[EpisodeHistory]) -> list[EpisodeHistory]:
    return sorted(histories, key=lambda history: (history.ticket.member, history.ticket.attempt))


def _is_settled(history: EpisodeHistory, terms: RecoveryTerms, in_ledger: Collection[str]) -> bool:
    """Whether a scored episode reached the ledger, as it does only with its whole group."""
    return history.ended is not None and not terms.has_failed(history) and history.ticket.episode_id in in_ledger


def _started(histories: Iterable[EpisodeHistory]) -> int:
    """The step of the weights that a group began with."""
    return min(version.step for version in _versions(histories).values())


def _versions(histories: Iterable[EpisodeHistory]) -> dict[str, PolicyVersion]:
    """The oldest version of each policy that a group's members began with."""
    found: dict[str, PolicyVersion] = {}
    for history in histories:
        for policy, version in history.ticket.started_at.items():
            older = found.get(policy)
            found[policy] = version if older is None or version.step < older.step else older
    return found
