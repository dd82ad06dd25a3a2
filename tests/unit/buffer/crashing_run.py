"""A run without engines and trainer that can die at any moment: a buffer, its journals in memory, a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from buffer_states import at, frontier_of, make_buffer

from agentrl.buffer.config import BufferConfig
from agentrl.buffer.frontier import FrontierState
from agentrl.buffer.ledger import LedgerLine
from agentrl.buffer.recovery import Recovered, RecoveryTerms, recover
from agentrl.buffer.step_journal import BufferJournal
from agentrl.journal.entries import NO_EPISODE, Checkpointed, Dropped, Stepped, Taken, key_of, unpack
from agentrl.journal.history import EpisodeHistory, build_history
from agentrl.journal.reading import JournalState
from agentrl.rollouts.durable import WorkerLog
from agentrl.testing.builders import build_episode
from agentrl.testing.sole_holder import SoleHolder
from agentrl.types.batch import TrainBatch
from agentrl.types.environment import Score, ScoreRecord
from agentrl.types.episode import Agent, Episode, Ticket
from agentrl.types.errors import Failure
from agentrl.types.generation import FinishReason

Record = tuple[int, int, bytes]


class DiedError(Exception):
    """The process ended here; nothing behind this line happens in its life."""


class MemoryWriter:
    """A journal writer whose disk is a list.

    What is appended is durable with all before it, unless the process dies in that very call; of what is pending a
    crash keeps some prefix.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.num_durable = 0
        self.dies_in_append = False

    @property
    def num_pending(self) -> int:
        return len(self.records) - self.num_durable

    async def append(self, schema: int, kind: int, payload: bytes) -> None:
        self.records.append((schema, kind, payload))
        if self.dies_in_append:
            raise DiedError
        self.num_durable = len(self.records)

    def note(self, schema: int, kind: int, payload: bytes) -> None:
        self.records.append((schema, kind, payload))

    def crash(self, num_lost: int) -> None:
        """Lose the newest entries; those that stay are on the disk from now on."""
        assert num_lost <= self.num_pending
        del self.records[len(self.records) - num_lost :]
        self.num_durable = len(self.records)
        self.dies_in_append = False


def read_records(records: list[Record]) -> JournalState:
    """What `read_journal` makes of files with these entries."""
    state, by_key = JournalState(), {}
    for record in records:
        entry, key = unpack(*record), key_of(record[2])
        if key != NO_EPISODE:
            by_key.setdefault(key, []).append(entry)
        kept = {Taken: state.taken, Stepped: state.stepped, Dropped: state.dropped}.get(type(entry))
        if kept is not None:
            kept.append(entry)
        if isinstance(entry, Checkpointed):
            state.checkpointed = entry.steps
    histories = [history for history in map(build_history, by_key.values()) if history is not None]
    state.lives = {history.ticket.episode_id: history for history in histories}
    return state


@dataclass
class Playing:
    """An episode under way: its log and the replies so far, each as tokens and the step of their version."""

    ticket: Ticket
    log: WorkerLog
    replies: list[tuple[int, int]]

    async def reply(self, tokens: int, step: int) -> None:
        self.replies.append((tokens, step))
        turn = len(self.replies) - 1
        so_far = build_episode(self.ticket, self.replies)
        nodes = [node for node in so_far.nodes if node.turn == turn]
        await self.log.turned(so_far.turns[turn], nodes, FinishReason.STOP, f"request {turn}")

    def episode(self, reward: float | None, failure: Failure | None) -> Episode:
        played = build_episode(self.ticket, self.replies, reward)
        return played if failure is None else replace(played, failure=failure, stop_reason=None)


@dataclass
class Checkpoint:
    """What outlives a crash beside the journals."""

    step: int = 0
    frontier: FrontierState = field(default_factory=FrontierState)
    num_lines: int = 0


@dataclass
class CrashingRun:
    """One run through all its starts. Each start takes its buffer from the checkpoint and the journals."""

    config: BufferConfig
    places: int
    attempts: int
    recover: Callable[..., Recovered] = recover
    worker_disk: MemoryWriter = field(default_factory=MemoryWriter)
    buffer_disk: MemoryWriter = field(default_factory=MemoryWriter)
    lines: list[LedgerLine] = field(default_factory=list)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    starts: int = 0
    playing: dict[str, Playing] = field(default_factory=dict)

    def start(self) -> tuple[Recovered, dict[str, EpisodeHistory]]:
        """Begin, or begin again; steps on record are still to be redone, and episodes to be opened."""
        self.starts += 1
        self.playing = {}
        del self.lines[self.checkpoint.num_lines :]
        state = read_records([*self.worker_disk.records, *self.buffer_disk.records])
        in_ledger = {line.episode_id for line in self.lines}
        terms = RecoveryTerms(
            {"main": self.checkpoint.step},
            {"fake": ("main",)},
            {"fake": ("verifier",)},
            self.config.group_size,
            self.attempts,
        )
        recovered = self.recover(state, terms, in_ledger=in_ledger)
        self.buffer = make_buffer(
            self.config,
            self.lines,
            self.places,
            self.attempts,
            step=self.checkpoint.step,
            frontier=self.checkpoint.frontier,
            journal=BufferJournal(self.buffer_disk),
        )
        self.buffer.restore(recovered)
        histories = {ticket.episode_id: state.lives[ticket.episode_id] for ticket in recovered.running}
        self.worker = SoleHolder(self.worker_disk, self.starts, histories)
        return recovered, histories

    async def open(self, ticket: Ticket, history: EpisodeHistory | None = None) -> None:
        """Lease an episode; one that was played before goes on behind its last reply on record."""
        log = await self.worker.open(ticket, (Agent("agent", "main"),))
        turns = history.turns if history else []
        spans = [(turned.nodes[-1], turned.nodes[-1].sample.versions[0].version.step) for turned in turns]
        replies = [(len(node.token_ids), step) for node, step in spans]
        self.playing[ticket.episode_id] = Playing(ticket, log, replies)

    async def redo(self, recovered: Recovered) -> list[TrainBatch]:
        """Bring the trainer to where it was, as `orchestration.redo` does; returns what it trained."""
        batches = []
        steps = recovered.redo.get("main", ())
        for step in steps:
            batches.append(await self.buffer.retake(step))
            await self.buffer.trained(*at(step.step + 1))
        if steps:
            await self.buffer.loaded(*at(steps[-1].step + 1))
        return batches

    async def end(self, name: str, reward: float | None, failure: Failure | None) -> Episode:
        """An end is on record before the buffer hears of it."""
        episode = self.outcome(name, reward, failure)
        if failure is None:
            await self.playing[name].log.scored(ScoreRecord("verifier", Score(episode.reward)))
        await self.playing[name].log.ended(episode)
        del self.playing[name]
        await self.buffer.settle(episode)
        return episode

    def outcome(self, name: str, reward: float | None, failure: Failure | None) -> Episode:
        """How an episode ends: a verdict that is on record is not asked for again, as in the runner."""
        history = self.playing[name].log.history
        verdict = history.scores.get("verifier") if history is not None else None
        if verdict is not None and verdict.score is not None and failure is None:
            reward = verdict.score.reward
        return self.playing[name].episode(reward, failure)

    async def save(self, step: int, dies_at: str | None) -> None:
        """A checkpoint, in the order of `Controller._checkpoint`."""
        frontier, num_lines = frontier_of(self.buffer, step), len(self.lines)
        if dies_at == "before progress":
            raise DiedError
        self.checkpoint = Checkpoint(step, frontier, num_lines)
        if dies_at == "before its record":
            raise DiedError
        await self.buffer.journal.checkpointed({"main": step})
