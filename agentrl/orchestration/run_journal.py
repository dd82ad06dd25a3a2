"""A run's journals: who may write them, what they held at the start, and who writes them now."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.buffer.recovery import Recovered, RecoveryTerms, recover
from agentrl.buffer.step_journal import BufferJournal, NoStepJournal, StepJournal
from agentrl.buffer.task_order import TaskOrder
from agentrl.journal.archiver import ArchiverProcess
from agentrl.journal.claim import Claim
from agentrl.journal.durable_offsets import SegmentEnd, verify_offsets
from agentrl.journal.entries import NO_HOLDER, Entry, Stepped
from agentrl.journal.history import EpisodeHistory
from agentrl.journal.holder import pack_entries, read_played
from agentrl.journal.index import open_journal
from agentrl.journal.reading import JournalState, LiveSegments, read_journal
from agentrl.journal.rewriting import give_up, rewrite
from agentrl.journal.writer import JournalWriter
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.run_directory import Progress, RunDirectory
from agentrl.orchestration.worker_journals import WorkerJournals
from agentrl.rollouts.durable import WorkerJournal
from agentrl.rollouts.episode_log import EpisodeJournal, NoJournal
from agentrl.types.episode import Episode, Ticket
from agentrl.types.errors import StorageError
from agentrl.types.rollout import PackedEntry
from agentrl.types.turn_score import TurnKey, TurnScore

_WORKER, _BUFFER = "worker-0", "buffer"


@dataclass(frozen=True, slots=True)
class LiveSession:
    """A session of an episode that has not ended, by the name under which its environment can be had again."""

    ticket: Ticket
    handle: str


@dataclass(slots=True)
class RunJournal:
    """The journals of one start of a run.

    `recovered` is what the buffer goes on from; `served` are the weights that steps behind the checkpoint made and
    that engines may have served, by policy and step, and of several epochs the newest. `epoch` is the highest of any
    version. `sessions` are those that earlier starts have left alive, by episode.
    """

    rollouts: EpisodeJournal
    buffer: StepJournal
    workers: WorkerJournals
    recovered: Recovered = field(default_factory=Recovered)
    served: dict[str, dict[int, Stepped]] = field(default_factory=dict)
    epoch: int = 0
    sessions: dict[str, LiveSession] = field(default_factory=dict)
    is_salvaged: bool = False
    _claim: Claim | None = None
    _writers: tuple[JournalWriter, ...] = ()
    _ends: tuple[SegmentEnd, ...] = ()
    _histories: dict[str, EpisodeHistory] = field(default_factory=dict)
    _archiver: ArchiverProcess | None = None

    @classmethod
    def none(cls) -> RunJournal:
        """Keeps nothing."""
        return cls(NoJournal(), NoStepJournal(), WorkerJournals())

    @classmethod
    def open(
        cls, claim: Claim, run: RunDirectory, config: RunConfig, first: Progress, in_ledger: set[str], is_salvaged: bool
    ) -> RunJournal:
        """Read what a run's journals hold beyond the checkpoint `first`, and be ready to write.

        Raises:
            StorageError: they cannot be read, are of a newer program, or are damaged, or end before what the
                checkpoint knows, and are not to be salvaged.
        """
        folder = claim.folder
        state = _salvaged(folder, first, config) if is_salvaged else open_journal(folder)
        if not is_salvaged:
            verify_offsets(folder, first.journal, state.torn_tails)
            _check_newest(run, state, first)
        recovered = _recover(folder, state, _terms(config, first), in_ledger, is_salvaged)
        worker = WorkerJournal(_writer(claim, _WORKER, config))
        buffer = BufferJournal(_writer(claim, _BUFFER, config))
        if is_salvaged:
            kept = [history for name, history in state.lives.items() if name not in in_ledger]
            rewrite(claim, kept, _still_needed(state, recovered), first.journal)
        versions = [stepped.version for stepped in state.stepped]
        served: dict[str, dict[int, Stepped]] = {}
        for entry in sorted(state.stepped, key=lambda entry: entry.version.epoch):
            served.setdefault(entry.policy, {})[entry.step] = entry
        return cls(
            rollouts=worker,
            buffer=buffer,
            workers=WorkerJournals(claim, worker),
            recovered=recovered,
            served=served,
            epoch=max(version.epoch for version in (*first.versions.values(), *versions)),
            sessions={
                name: LiveSession(history.ticket, history.session)
                for name, history in state.lives.items()
                if history.session is not None
            },
            is_salvaged=is_salvaged,
            _claim=claim,
            _writers=(worker.writer, buffer.writer),
            _ends=first.journal,
            _histories=_playing(recovered, state.lives),
            _archiver=_archiver(claim, run, config),
        )

    @classmethod
    def of_ended(cls, claim: Claim, run: RunDirectory, config: RunConfig) -> RunJournal:
        """Be ready to write the end of a run whose loops have ended."""
        buffer = BufferJournal(_writer(claim, _BUFFER, config))
        archiver = _archiver(claim, run, config)
        return cls(NoJournal(), buffer, WorkerJournals(), _claim=claim, _writers=(buffer.writer,), _archiver=archiver)

    @property
    def is_durable(self) -> bool:
        """Whether episodes that are parked can be resumed."""
        return self._claim is not None

    def check(self) -> None:
        """Raises StorageError once another process has taken this run over: then nothing of it may be changed."""
        if self._claim is not None:
            self._claim.check()

    @property
    def is_held(self) -> bool:
        """Whether this process still has the run."""
        try:
            self.check()
        except StorageError:
            return False
        return True

    def ends(self) -> tuple[SegmentEnd, ...]:
        """How far each writer's journal is durable; of one that has not written yet, what was known at the start."""
        newest = [writer.newest for writer in self._writers if writer.newest is not None]
        return tuple({end.writer: end for end in (*self._ends, *self.workers.ends.values(), *newest)}.values())

    def turn_scores(self) -> dict[str, dict[str, dict[TurnKey, TurnScore]]]:
        """What is on record of the turns of episodes in flight, by episode and scorer; before they are handed over."""
        return {name: dict(history.turn_scores) for name, history in self._histories.items() if history.turn_scores}

    def hand_over(self) -> tuple[list[tuple[Ticket, tuple[PackedEntry, ...]]], tuple[Episode, ...]]:
        """Return the episodes in flight, as their workers put them on record, and those to be scored; release the rest.

        What scorers said of their turns is `turn_scores`; it is no part of what a worker goes on from.
        """
        recovered, self.recovered = self.recovered, Recovered()
        histories, self._histories = self._histories, {}
        played = {name: [e for e in h.entries if e.token != NO_HOLDER] for name, h in histories.items()}
        running = [(t, pack_entries(t.episode_id, played[t.episode_id])) for t in recovered.running]
        return running, recovered.unscored

    def tidy(self) -> None:
        """Move what the last checkpoint made final into the archive, while the run goes on.

        Raises:
            StorageError: the last time it could not.
        """
        if self._archiver is not None:
            self._archiver.begin()

    async def played(self, tickets: Sequence[Ticket]) -> dict[str, Episode]:
        """What is on record of episodes that the run's end has cut off, by name; none is without a lease from then on.

        Waits for: the disk.

        Raises:
            StorageError: the journal cannot be written or read.
        """
        if self._claim is None:
            return {}
        for writer in self._writers:
            await writer.flush()
        names = [ticket.episode_id for ticket in tickets]
        played = await asyncio.to_thread(read_played, self._claim.folder, names)
        for ticket in tickets:
            if ticket.episode_id not in played:
                await self.workers.lease(ticket)
        for writer in self._writers:
            await writer.flush()
        return played

    async def settled(self) -> None:
        """Wait for what is on its way into the archive. Raises StorageError if it did not get there."""
        if self._archiver is not None:
            await self._archiver.settled()

    async def archive(self) -> None:
        """Archive all that is final by now.

        Waits for: the archiver. Unblocked by: its end, or its deadline.

        Raises:
            StorageError: it could not.
        """
        if self._archiver is not None:
            await self._archiver.archive()

    async def close(self) -> None:
        """Sync what is pending; safe to call twice.

        Waits for: the disk, and the archive. Unblocked by: these, or their deadlines.

        Raises:
            StorageError: something could not be written, or not in time.
        """
        for writer in self._writers:
            await writer.close()
        if self._archiver is not None:
            await self._archiver.close()


def _archiver(claim: Claim, run: RunDirectory, config: RunConfig) -> ArchiverProcess:
    return ArchiverProcess(claim, run.episodes, run.logs / "archiver.log", config.journal.keep_bytes)


def _writer(claim: Claim, name: str, config: RunConfig) -> JournalWriter:
    return JournalWriter(claim.folder, name, check_right=claim.check, gather_s=config.journal.gather_s)


def _terms(config: RunConfig, first: Progress) -> RecoveryTerms:
    return RecoveryTerms(
        checkpoint=first.steps,
        policies={name: config.trained_in(name) for name in config.environments},
        scorers={name: config.required_scorers(name) for name in config.environments},
        group_size=config.buffer.group_size,
        max_attempts=config.rollout.max_attempts,
        forks=config.buffer.forks,
    )


def _check_newest(run: RunDirectory, state: JournalState, first: Progress) -> None:
    """Raises StorageError if the journal knows of a newer checkpoint than is there."""
    for policy, step in state.checkpointed.items():
        if first.steps.get(policy, 0) < step:
            raise StorageError(
                f"checkpoint {run.checkpoint(policy, step)} is missing, which the journal knows to be complete; put it "
                "back, or go on from an older one: `agentrl resume RUN --salvage`"
            )


def _recover(
    folder: Path, state: JournalState, terms: RecoveryTerms, in_ledger: set[str], is_salvaged: bool
) -> Recovered:
    """What the buffer goes on from. Raises StorageError that names the segments which must have lost something."""
    try:
        return recover(state, terms, in_ledger, is_salvaged)
    except StorageError as error:
        names = ", ".join(str(path) for path in LiveSegments.of(folder).paths)
        raise StorageError(
            f"the journal lacks what was acknowledged in it: {error}. One of {names} has lost its end, or another is "
            "missing; restore it from a copy, or go on without it: `agentrl resume RUN --salvage`"
        ) from error


def _salvaged(folder: Path, first: Progress, config: RunConfig) -> JournalState:
    """What is left of the journal, without the groups that the checkpoint knows to be done."""
    state = read_journal(folder, salvage=True)
    order = TaskOrder({name: section.weight for name, section in config.environments.items()}, first.frontiers)
    state.lives = {name: h for name, h in state.lives.items() if not order.is_done(h.ticket.group)}
    for history in state.lives.values():
        if history.ended is None or not history.is_whole:
            give_up(history)
    return state


def _still_needed(state: JournalState, recovered: Recovered) -> list[Entry]:
    """What the buffer wrote that whoever opens the salvaged journal must know, too.

    These are steps to be redone, groups that will not be trained, and of groups that wait for some policy who is done.
    """
    redone = {(step.policy, step.step) for steps in recovered.redo.values() for step in steps}
    waiting = {group.number for group in recovered.groups}
    needed: list[Entry] = []
    for entry in state.taken:
        if (entry.policy, entry.step) in redone:
            needed.append(entry)
            continue
        policies = entry.policies or ((entry.policy,),) * len(entry.groups)
        trained = [
            (group, of_group)
            for group, of_group in zip(entry.groups, policies, strict=True)
            if recovered.trained.get(group[0], {}).get(entry.policy) == entry.version
        ]
        if trained:
            groups, of_groups = zip(*trained, strict=True)
            needed.append(replace(entry, groups=groups, policies=of_groups))
    left_out = (entry for entry in state.left_out if entry.group in waiting)
    return [*needed, *left_out, *(entry for entry, _ in recovered.dropped)]


def _playing(recovered: Recovered, histories: dict[str, EpisodeHistory]) -> dict[str, EpisodeHistory]:
    return {ticket.episode_id: histories[ticket.episode_id] for ticket in recovered.running}
