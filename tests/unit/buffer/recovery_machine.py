"""The machine that lets a run die at any moment, recovers it, and holds it to a model that knows of no crash."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from buffer_states import at, attempt, configs, frontier_of
from crashing_run import CrashingRun, DiedError, MemoryWriter, read_records
from durable_model import DurableModel, as_seen
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentrl.buffer.recovery import recover
from agentrl.types.episode import Ticket
from agentrl.types.errors import Boundary, Failure

CRASH = Failure(Boundary.ENVIRONMENT, "crashed", "gone")
ENDS = {"scored 0": (0.0, None), "scored 1": (1.0, None), "unscored": (None, None), "failed": (None, CRASH)}
MANY = 50  # rounds after which whatever can end has ended
MOMENTS_OF_A_STEP = ["before its record", "taken", "trained", "stepped", None, None]


class RecoveryMachine(RuleBasedStateMachine):
    """Production, training, checkpoints and crashes in any order, then the run is driven to its end."""

    recover = staticmethod(recover)

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.unleased: dict[str, Ticket] = {}
        self.known: set[str] = set()

    @initialize(config=configs([None, 0, 1]), places=st.sampled_from([12, 5]), attempts=st.integers(1, 2))
    def begin(self, config, places, attempts):
        self.model = DurableModel(config, places, attempts)
        self.run = CrashingRun(config, places, attempts, self.recover)
        self.run.start()

    @rule()
    def admit(self):
        self._lease(self._admit())

    @rule()
    def admit_and_be_slow_to_lease(self):
        self._admit()

    @precondition(lambda self: self.unleased)
    @rule()
    def lease(self):
        """One worker leases in the order of admission."""
        for ticket in list(self.unleased.values()):
            self._lease(ticket)

    @precondition(lambda self: self.run.playing)
    @rule(data=st.data(), tokens=st.integers(1, 3))
    def reply(self, data, tokens):
        self._do(self.run.playing[self._choose(data)].reply(tokens, self.model.loaded))

    @precondition(lambda self: self.run.playing)
    @rule(data=st.data())
    def release(self, data):
        name = self._choose(data)
        self._do(self.run.buffer.release(self.run.playing[name].ticket))
        self.model.running.discard(name)

    @precondition(lambda self: self.run.playing)
    @rule(data=st.data(), how=st.sampled_from(sorted(ENDS)))
    def end(self, data, how):
        self._end(self._choose(data), *ENDS[how])

    @precondition(lambda self: self.run.playing)
    @rule(data=st.data(), how=st.sampled_from(sorted(ENDS)))
    def die_before_an_end_is_acknowledged(self, data, how):
        name = self._choose(data)
        ticket, episode = self.run.playing[name].ticket, self.run.outcome(name, *ENDS[how])
        self._do(self._dies(self.run.worker_disk, self.run.end(name, *ENDS[how])))
        if self._crash(data):
            self.model.settle(ticket, episode)
        self._go_on(data)

    @rule(data=st.data(), dies=st.sampled_from(MOMENTS_OF_A_STEP))
    def step(self, data, dies):
        self._step(data, dies)

    @rule()
    def load(self):
        self._load()

    @rule(data=st.data(), dies=st.sampled_from(["before progress", "before its record", None, None]))
    def checkpoint(self, data, dies):
        try:
            self._do(self.run.save(self.model.version, dies))
        except DiedError:
            self._crash(data)
            self._go_on(data)

    @rule(data=st.data())
    def die(self, data):
        self._crash(data)
        self._go_on(data)

    @rule(data=st.data(), dies=st.sampled_from(MOMENTS_OF_A_STEP))
    def let_all_end_and_step(self, data, dies):
        self._let_all_end()
        assert self._step(data, dies), "whatever failed before: once all has ended, a step can be taken"

    @invariant()
    def the_buffer_is_where_the_model_is(self):
        if not hasattr(self, "model"):
            return
        model, buffer = self.model, self.run.buffer
        assert model.num_counted <= model.bound
        assert buffer.num_accepted("main") == model.num_counted - len(model.running)
        assert buffer.num_running == len(model.running)
        assert frontier_of(buffer, model.version) == model.frontier

    def teardown(self):
        if not hasattr(self, "model"):
            return
        self._let_all_end()
        assert self._step(None, None)
        self._do(self.run.save(self.model.version, None))
        self.run.buffer.close({})
        ends = Counter(line.episode_id for line in self.run.lines)
        assert set(ends.values()) == {1}
        assert set(ends) == self.known
        trained = {episode[0] for batch in self.model.taken for episode in batch}
        assert {line.episode_id for line in self.run.lines if line.outcome == "trained"} == trained
        self.loop.close()

    def _do(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def _choose(self, data: Any) -> str:
        return data.draw(st.sampled_from(sorted(self.run.playing)))

    def _admit(self) -> Ticket | None:
        expected = self.model.may_admit()
        ticket = self._do(attempt(self.run.buffer.admit()))
        assert (ticket is not None) == expected
        if ticket is not None:
            assert ticket.episode_id not in self.known, "a leased episode is gone on with, never dispatched anew"
            assert ticket.started_at == dict([at(self.model.loaded)])
            self.model.admit(ticket)
            self.unleased[ticket.episode_id] = ticket
        return ticket

    def _lease(self, last: Ticket | None) -> None:
        """Lease whatever was admitted up to a ticket."""
        for name, ticket in list(self.unleased.items()) if last is not None else ():
            self._do(self.run.open(ticket))
            self.known.add(name)
            del self.unleased[name]

    def _end(self, name: str, reward: float | None, failure: Failure | None) -> None:
        ticket = self.run.playing[name].ticket
        self.model.settle(ticket, self._do(self.run.end(name, reward, failure)))

    def _load(self) -> None:
        self._do(self.run.buffer.loaded(*at(self.model.version)))
        self.model.loaded = self.model.version

    def _let_all_end(self) -> None:
        self._load()
        for _ in range(MANY):
            while self.model.may_admit():
                self._admit()
            self._lease(next(iter(self.unleased.values()), None))
            if not self.run.playing:
                break
            for name in sorted(self.run.playing):
                self._do(self.run.playing[name].reply(2, self.model.loaded))
                self._end(name, float(self.run.playing[name].ticket.member % 2), None)
        assert not self.model.in_flight

    def _step(self, data: Any, dies: str | None) -> bool:
        """Take, train and put a step on record, or die on the way; False if nothing can be taken."""
        buffer, model = self.run.buffer, self.model
        if dies == "before its record":
            self._do(self._dies(self.run.buffer_disk, attempt(buffer.take(*at(model.version)))))
            self._crash(data)
            self._go_on(data)
            return True
        batch = self._do(attempt(buffer.take(*at(model.version))))
        if batch is None:
            assert model.config.staleness == "wait" or len(model.next_step()) < model.config.groups_per_step
            return False
        model.take(batch)
        if dies != "taken":
            self._do(buffer.trained(*at(model.version + 1)))
            model.train()
        if dies not in ("taken", "trained"):
            self._do(buffer.journal.stepped(*at(model.version), "digest"))
        if dies is not None:
            self._crash(data)
            self._go_on(data)
        return True

    async def _dies(self, disk: MemoryWriter, work: Any) -> None:
        """Do what ends in the midst of an append to a disk, or before it comes to one."""
        disk.dies_in_append = True
        try:
            await work
        except DiedError:
            return

    def _crash(self, data: Any) -> bool:
        """Lose some of what is not durable; returns whether the worker's disk kept all."""
        disks = (self.run.worker_disk, self.run.buffer_disk)
        lost = [data.draw(st.integers(0, disk.num_pending)) for disk in disks]
        for disk, num_lost in zip(disks, lost, strict=True):
            disk.crash(num_lost)
        leased = set(read_records(self.run.worker_disk.records).lives)
        lost_leases = [playing.ticket for name, playing in self.run.playing.items() if name not in leased]
        for ticket in [*self.unleased.values(), *lost_leases]:
            self.model.forget(ticket)
            self.known.discard(ticket.episode_id)
        self.unleased.clear()
        return lost[0] == 0

    def _go_on(self, data: Any) -> None:
        """Recover, redo and reopen, perhaps to die again before all of that is done."""
        recovered, histories = self.run.start()
        assert set(histories) == set(self.model.in_flight), "who plays goes on, who ended does not play again"
        if data.draw(st.booleans(), label="dies again"):
            self.run.worker_disk.crash(0)
            self.run.buffer_disk.crash(data.draw(st.integers(0, self.run.buffer_disk.num_pending)))
            recovered, histories = self.run.start()
        first = self.run.checkpoint.step
        for number, batch in enumerate(self._do(self.run.redo(recovered)), first):
            if number == len(self.model.taken):  # its record was kept although nobody heard so
                self.model.take(batch)
            assert as_seen(batch) == self.model.taken[number], "the same episodes in the same order"
        assert first + len(recovered.redo.get("main", ())) == len(self.model.taken)
        self.model.train()
        if recovered.redo:
            self.model.loaded = self.model.version
        else:
            self.model.loaded = self.run.checkpoint.step
        self.model.running = set(self.model.in_flight)
        for ticket in recovered.running:
            self._do(self.run.open(ticket, histories[ticket.episode_id]))
