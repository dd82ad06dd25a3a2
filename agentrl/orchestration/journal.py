"""A run's journals: who may write them, what they held at the start, and who writes them now."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from agentrl.buffer.frontier import FrontierState
from agentrl.buffer.journal import BufferJournal, NoStepJournal, StepJournal
from agentrl.buffer.recovery import Recovered, recover
from agentrl.journal.archiver import ArchiverProcess
from agentrl.journal.claim import Claim
from agentrl.journal.durable_offsets import SegmentEnd, verify_offsets
from agentrl.journal.entries import Stepped
from agentrl.journal.history import EpisodeHistory
from agentrl.journal.index import open_journal
from agentrl.journal.reading import JournalState, read_journal
from agentrl.journal.rewriting import give_up, rewrite
from agentrl.journal.writer import JournalWriter
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.run_directory import Progress, RunDirectory
from agentrl.rollouts.durable import WorkerJournal
from agentrl.rollouts.journal import EpisodeJournal, NoJournal
from agentrl.types.episode import Ticket
from agentrl.types.errors import StorageError

_WORKER, _BUFFER = "worker-0", "buffer"


@dataclass(slots=True)
class RunJournal:
    """The journals of one start of a run.

    `recovered` is what the buffer goes on from; `served` are the weights that steps behind the checkpoint made and
    that engines may have served, by step and of several epochs the newest. `epoch` is the highest of any version.
    """

    rollouts: EpisodeJournal
    buffer: StepJournal
    recovered: Recovered = field(default_factory=Recovered)
    served: dict[int, Stepped] = field(default_factory=dict)
    epoch: int = 0
    is_salvaged: bool = False
    _claim: Claim | None = None
    _writers: tuple[JournalWriter, ...] = ()
    _ends: tuple[SegmentEnd, ...] = ()
    _worker: WorkerJournal | None = None
    _archiver: ArchiverProcess | None = None

    @classmethod
    def none(cls) -> RunJournal:
        """Keeps nothing."""
        return cls(NoJournal(), NoStepJournal())

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
        state = _salvaged(folder, first.frontier) if is_salvaged else open_journal(folder)
        if not is_salvaged:
            verify_offsets(folder, first.journal, state.torn_tails)
        recovered = recover(
            state,
            first.version.step,
            config.buffer.group_size,
            config.rollout.max_attempts,
            in_ledger=in_ledger,
            is_salvaged=is_salvaged,
        )
        worker = WorkerJournal(_writer(claim, _WORKER, config), claim.token, _playing(recovered, state.lives))
        buffer = BufferJournal(_writer(claim, _BUFFER, config))
        if is_salvaged:
            kept = [life for name, life in state.lives.items() if name not in in_ledger]
            taken = [entry for entry in state.taken if entry.step in {step.step for step in recovered.redo}]
            rewrite(claim, _BUFFER, kept, [*taken, *(entry for entry, _ in recovered.dropped)], first.journal)
        versions = [version for stepped in state.stepped for version in stepped.versions.values()]
        return cls(
            rollouts=worker,
            buffer=buffer,
            recovered=recovered,
            served={entry.step: entry for entry in sorted(state.stepped, key=_epoch)},
            epoch=max((first.version.epoch, *(version.epoch for version in versions))),
            is_salvaged=is_salvaged,
            _claim=claim,
            _writers=(worker.writer, buffer.writer),
            _ends=first.journal,
            _worker=worker,
            _archiver=ArchiverProcess(
                claim, run.path / "episodes", run.logs / "archiver.log", config.journal.keep_bytes
            ),
        )

    @property
    def is_durable(self) -> bool:
        """Whether episodes that are parked can be resumed."""
        return self._worker is not None

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

    def end(self) -> None:
        """The run is over: what is cut off now is not resumed."""
        if self._worker is not None:
            self._worker.is_over = True

    def ends(self) -> tuple[SegmentEnd, ...]:
        """How far each writer's journal is durable; of one that has not written yet, what was known at the start."""
        newest = [writer.newest for writer in self._writers if writer.newest is not None]
        return tuple({end.writer: end for end in (*self._ends, *newest)}.values())

    def hand_over(self) -> tuple[Ticket, ...]:
        """Return the tickets of the episodes in flight and release the recovered state."""
        running, self.recovered = self.recovered.running, Recovered()
        return running

    def tidy(self) -> None:
        """Move what the last checkpoint made final into the archive, while the run goes on.

        Raises:
            StorageError: the last time it could not.
        """
        if self._archiver is not None:
            self._archiver.begin()

    def park(self) -> None:
        """Let every episode stop at its next safe place."""
        if self._worker is not None:
            self._worker.park()

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


def _writer(claim: Claim, name: str, config: RunConfig) -> JournalWriter:
    return JournalWriter(claim.folder, name, check_right=claim.check, gather_s=config.journal.gather_s)


def _salvaged(folder: Path, frontier: FrontierState) -> JournalState:
    """What is left of the journal, without the groups that the checkpoint knows to be done."""
    state = read_journal(folder, salvage=True)
    for name, life in list(state.lives.items()):
        if life.ticket.group < frontier.low or life.ticket.group in frontier.done:
            del state.lives[name]
    for life in state.lives.values():
        if life.ended is None or not life.is_whole:
            give_up(life)
    return state


def _playing(recovered: Recovered, lives: dict[str, EpisodeHistory]) -> dict[str, EpisodeHistory]:
    return {ticket.episode_id: lives[ticket.episode_id] for ticket in recovered.running}


def _epoch(entry: Stepped) -> int:
    return max(version.epoch for version in entry.versions.values())
