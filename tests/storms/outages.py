"""Runs that lose power or are killed, over and over: what was acknowledged is compared with what a disk may hold.

Workers append the entries of many episodes at once through `JournalWriter` over a disk that notes every call. Then,
for each call, what a loss of power at that moment leaves is rebuilt several times by chance and read; one of these
states, or what a killed process leaves, is what the next start goes on from.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np

from agentrl.journal import entries as e
from agentrl.journal.claim import Claim
from agentrl.journal.frames import Frame
from agentrl.journal.history import EpisodeHistory
from agentrl.journal.reading import JournalState, read_journal
from agentrl.journal.segments import read_segment, segment_paths
from agentrl.journal.writer import JournalWriter
from agentrl.testing.builders import build_ticket
from agentrl.testing.power_loss import Call, Content, DiskImage, RecordingDisk, write_content
from agentrl.types.environment import Opening, StepResult
from agentrl.types.episode import Agent, Effect, Node, SampledColumns, StopReason, Turn
from agentrl.types.generation import FinishReason, Generation
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.version import PolicyVersion, VersionSpan

JOURNAL = Path("run", "journal")
TRAINER = None
"""In place of an episode: the steps of the trainer, which has no episode."""
V = PolicyVersion(0, 3)
TURNED = e.NUMBERS[e.TurnCommitted]
MIN_ENTRIES_BYTES = 200

Written = tuple[int, bytes]
"""Kind and payload of an entry."""


@dataclass(frozen=True)
class OutagePlan:
    """How much is written in each of `num_starts`, and how many states are rebuilt for each call to the disk."""

    num_starts: int = 4
    num_workers: int = 2
    num_episodes: int = 4
    num_turns: int = 2
    segment_bytes: int = 2500
    losses_per_moment: int = 10
    seed: int = 0


@dataclass
class Verdict:
    """What was found wrong, by its name, in how many states; `turns_lost` counts replies of all states."""

    states: int = 0
    starts: int = 0
    entries: int = 0
    turns_lost: int = 0
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, other: Verdict) -> None:
        """Sum up with that of another run."""
        self.states += other.states
        self.starts += other.starts
        self.entries += other.entries
        self.turns_lost += other.turns_lost
        self.faults += other.faults


@dataclass
class Story:
    """What one start has appended, and from which moment on of what it must not lose any more."""

    base: Content
    appended: dict[str | None, list[Written]] = field(default_factory=dict)
    by_writer: dict[str, list[Written]] = field(default_factory=dict)
    told: list[tuple[int, str | None, int]] = field(default_factory=list)
    told_by_writer: list[tuple[int, str, int]] = field(default_factory=list)
    claimed: list[tuple[int, int]] = field(default_factory=list)

    def required(self, moment: int) -> dict[str | None, int]:
        """Entries of each episode that were acknowledged by then."""
        counts: dict[str | None, int] = {}
        for when, episode, count in self.told:
            if when <= moment:
                counts[episode] = max(count, counts.get(episode, 0))
        return counts


class Start:
    """One start of a run: claims the journal, reads it, and lets its workers go on with what they find."""

    def __init__(self, disk: RecordingDisk, plan: OutagePlan, story: Story, name: str, random: Random) -> None:
        self._disk, self._plan, self._story, self._name, self._random = disk, plan, story, name, random
        self._folder = disk.root / JOURNAL
        self._token = 0

    async def run(self) -> None:
        """Waits for: all episodes to end. Unblocked by: the disk."""
        claim = Claim.take(self._folder, self._disk)
        self._token = claim.token
        self._story.claimed.append((self._disk.moment, claim.token))
        state = read_journal(self._folder, disk=self._disk)
        self._go_on_from(state)
        names = [f"rollouts-{number}" for number in range(self._plan.num_workers)]
        writers = {name: self._writer(name, claim) for name in names}
        going_on = [history for history in state.lives.values() if history.ended is None]
        fresh = [f"{self._name}-{number}" for number in range(self._plan.num_episodes - len(going_on))]
        async with asyncio.TaskGroup() as group:
            begun = [(history.ticket.episode_id, history) for history in going_on]
            for episode, history in [*begun, *((name, None) for name in fresh)]:
                writer = self._random.choice(names)
                group.create_task(self._play(writer, writers[writer], episode, history))
            group.create_task(self._train(names[0], writers[names[0]]))
        for writer in writers.values():
            await writer.close()

    def _writer(self, name: str, claim: Claim) -> JournalWriter:
        self._story.by_writer[name] = []
        return JournalWriter(self._folder, name, self._plan.segment_bytes, claim.check, self._disk)

    def _go_on_from(self, state: JournalState) -> None:
        """What was read is what this start builds on, so it must stay."""
        for episode, written in written_in(state).items():
            self._story.appended[episode] = written
            self._story.told.append((self._disk.moment, episode, len(written)))

    async def _train(self, name: str, writer: JournalWriter) -> None:
        for step in range(3):
            await self._append(name, writer, TRAINER, e.Stepped("main", V, f"{self._name}-{step}"))

    async def _play(self, name: str, writer: JournalWriter, episode: str, history: EpisodeHistory | None) -> None:
        """Play what is left of an episode."""
        token, ticket = self._token, build_ticket(episode)
        taken_over = len(history.entries) if history else 0
        lease = e.Leased(ticket, (Agent("agent", "main"),), token, taken_over)
        await self._append(name, writer, episode, lease)
        if history is None or history.opened is None:
            await self._append(
                name, writer, episode, e.EnvironmentStarted(token, Opening((Message(Role.USER, "count"),)))
            )
        for index in range(len(history.turns) if history else 0, self._plan.num_turns):
            ids = np.arange(self._random.randint(1, 30), dtype=np.int32)
            spans = (VersionSpan(V, 0, len(ids)),)
            sample = SampledColumns(np.zeros(len(ids), np.float32), spans, spans)
            part = Generation(ids, sample.logprobs, spans, spans, FinishReason.ABORT)
            writer.note(*self._write_down(name, episode, e.PartialReply(token, part, f"{index}")))
            node = Node(index, index - 1 if index else None, "agent", index, ids, sample)
            turn = Turn(index, "agent", index)
            await self._append(
                name, writer, episode, e.TurnCommitted(token, turn, (node,), FinishReason.STOP, f"{index}")
            )
            call = ToolCall(f"{episode}/{index}.0", "count", {"n": index})
            await self._append(name, writer, episode, e.Intended(token, index, (Effect(call.id, call),)))
            result = StepResult((Message(Role.TOOL, "1", tool_call_id=call.id),))
            done = (Effect(call.id, call, "1", 0.1),)
            await self._append(name, writer, episode, e.StepResultRecorded(token, index, done, result, 0.1))
        await self._append(name, writer, episode, e.Ended(token, StopReason.ANSWERED, None, 1.0))

    async def _append(self, name: str, writer: JournalWriter, episode: str | None, entry: e.Entry) -> None:
        packed = self._write_down(name, episode, entry)
        count, place = len(self._story.appended[episode]), len(self._story.by_writer[name])
        await writer.append(*packed)
        self._story.told.append((self._disk.moment, episode, count))
        self._story.told_by_writer.append((self._disk.moment, name, place))

    def _write_down(self, name: str, episode: str | None, entry: e.Entry) -> tuple[int, int, bytes]:
        schema, kind, payload = e.pack(episode, entry)
        self._story.appended.setdefault(episode, []).append((kind, payload))
        self._story.by_writer[name].append((kind, payload))
        return schema, kind, payload


def written_in(state: JournalState) -> dict[str | None, list[Written]]:
    """What a journal holds of each episode, as it was written."""
    histories = {name: [e.pack(name, entry)[1:] for entry in history.entries] for name, history in state.lives.items()}
    return {TRAINER: [e.pack(None, step)[1:] for step in state.stepped], **histories}


class Judge:
    """Reads states of a disk, and says what is wrong with them."""

    def __init__(self, scratch: Path, verdict: Verdict) -> None:
        self._scratch, self._verdict = scratch, verdict
        self._present: Content = {}

    def judge(self, content: Content, story: Story, moment: int) -> None:
        """Compare one state with what had been appended and acknowledged at that moment."""
        write_content(self._scratch, content, self._present)
        self._verdict.states += 1
        try:
            found = written_in(read_journal(self._scratch / JOURNAL, disk=RecordingDisk(self._scratch)))
        except Exception:  # noqa: BLE001 - whatever a reader raises, what was acknowledged is out of reach
            self._verdict.faults["unreadable"] += 1
            return
        required = story.required(moment)
        for episode in found.keys() | required.keys():
            self._compare(found.get(episode, []), story.appended.get(episode, []), required.get(episode, 0))
        for name, written in story.by_writer.items():
            told = [count for when, writer, count in story.told_by_writer if writer == name and when <= moment]
            self._compare(self._by_writer(name, story), written, max(told, default=0))
        token = max((token for when, token in story.claimed if when <= moment), default=0)
        if token > max((int(path.stem.split("-")[1]) for path in content if path.suffix == ".json"), default=0):
            self._verdict.faults["claim lost"] += 1

    def _compare(self, found: list[Written], appended: list[Written], required: int) -> None:
        self._verdict.entries += len(found)
        if found != appended[: len(found)]:
            self._verdict.faults["not as appended"] += 1
        elif len(found) < required:
            self._verdict.faults["lost"] += 1
            self._verdict.turns_lost += sum(kind == TURNED for kind, _ in appended[len(found) : required])

    def _by_writer(self, name: str, story: Story) -> list[Written]:
        """What this start has written, across episodes: nothing behind a hole may show."""
        new = [p for p in segment_paths(self._scratch / JOURNAL, name) if JOURNAL / p.name not in story.base]
        disk = RecordingDisk(self._scratch)
        pieces = [piece for path in new for piece in read_segment(path, disk=disk)]
        return [(piece.kind, piece.payload) for piece in pieces if isinstance(piece, Frame)]


async def play_outages(plan: OutagePlan, scratch: Path, **protections: bool) -> Verdict:
    """Start a run again and again; `protections` are those of `RecordingDisk`."""
    verdict, random = Verdict(), Random(plan.seed)
    judge = Judge(scratch / "states", verdict)
    image, base, told = DiskImage({}), {}, []
    for number in range(plan.num_starts):
        root = scratch / f"start-{number}"
        root.mkdir(parents=True)
        write_content(root, base, {})
        disk, story = RecordingDisk(root, **protections), Story(base, told=told)
        try:
            verdict.starts += 1
            await Start(disk, plan, story, f"{number}", random).run()
        except Exception:  # noqa: BLE001 - whatever a start raises, the run cannot go on
            verdict.faults["no start"] += 1
            break
        chosen, is_killed = random.randint(0, disk.moment), number % 2 == 0
        if is_killed:
            # Amid entries that are not synced, since only those are at stake.
            writes = [n for n, done in enumerate(disk.operations) if len(done.data) > MIN_ENTRIES_BYTES]
            chosen = random.choice(writes) + random.randint(0, 1)
        told = [(0, episode, count) for episode, count in story.required(chosen).items()]
        following = _judge_losses(disk, image, story, judge, plan, random, chosen, is_killed)
        image, base = following, following.cached()
    return verdict


def _judge_losses(
    disk: RecordingDisk,
    image: DiskImage,
    story: Story,
    judge: Judge,
    plan: OutagePlan,
    random: Random,
    chosen: int,
    is_killed: bool,
) -> DiskImage:
    """Judge losses of power at every moment; what the one at moment `chosen`, or a kill, leaves to the next start."""
    following = image
    for moment in range(disk.moment + 1):
        states = [image.after_loss(random) for _ in range(plan.losses_per_moment)]
        for content in states:
            judge.judge(content, story, moment)
        if moment == chosen:
            following = _killed(disk, image, random, moment) if is_killed else DiskImage(states[0])
        if moment < disk.moment:
            image.apply(disk.operations[moment])
    return following


def _killed(disk: RecordingDisk, image: DiskImage, random: Random, moment: int) -> DiskImage:
    """What a process leaves that was killed within its next call: all that it wrote, synced or not."""
    left = deepcopy(image)
    if moment < disk.moment and disk.operations[moment].call == Call.WRITE:
        torn = disk.operations[moment]
        left.apply(replace(torn, data=torn.data[: random.randint(0, len(torn.data))]))
    return left
