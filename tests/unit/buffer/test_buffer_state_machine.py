from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import replace

from buffer_states import BufferModel, at, attempt, configs, good_episode, make_buffer
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentrl.buffer.ledger import LedgerLine
from agentrl.testing.builders import build_episode
from agentrl.types.errors import Boundary, Failure

CRASH = Failure(Boundary.ENVIRONMENT, "crashed", "gone")
BOUNDS = (1, 2, 0, "unbounded")


class BufferMachine(RuleBasedStateMachine):
    """Rollouts, trainer and publisher in any order against the buffer and against a model of it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.lines: list[LedgerLine] = []

    @initialize(
        config=configs([None, 0, 1, 4], BOUNDS, forks=(0, 2, 3)),
        places=st.sampled_from([12, 5, 1]),
        attempts=st.integers(1, 2),
    )
    def begin(self, config, places, attempts):
        self.model = BufferModel(config, places, attempts)
        self.buffer = make_buffer(config, self.lines, places, attempts)

    @rule()
    def admit(self):
        expected = self.model.may_admit()
        ticket = self.loop.run_until_complete(attempt(self.buffer.admit()))
        assert (ticket is not None) == expected
        if ticket is not None:
            assert ticket.started_at == dict([at(self.model.loaded)])
            self.model.admit(ticket)

    @precondition(lambda self: self.model.in_flight)
    @rule(data=st.data())
    def release(self, data):
        ticket = self._choose(data)
        self.loop.run_until_complete(self.buffer.release(ticket))
        self.model.running.discard(ticket.episode_id)

    @precondition(lambda self: self.model.in_flight)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]), middle=st.integers(0, 2))
    def end_well(self, data, reward, middle):
        self._end_well(self._choose(data), reward, middle)

    @precondition(lambda self: self.model.in_flight)
    @rule(data=st.data(), is_crash=st.booleans())
    def fail(self, data, is_crash):
        ticket = self._choose(data)
        episode = build_episode(ticket, [(2, 0)], reward=None)
        failed = replace(episode, failure=CRASH, stop_reason=None) if is_crash else episode
        self.loop.run_until_complete(self.buffer.settle(failed))
        self.model.settle(ticket, None)
        self.loop.run_until_complete(self.buffer.settle(failed))  # repeated calls change nothing

    @rule()
    def take_and_train(self):
        self._take()

    @rule()
    def load(self):
        self.loop.run_until_complete(self.buffer.loaded(*at(self.model.version)))
        self.model.loaded = self.model.version

    @rule()
    def let_all_but_the_oldest_end_well(self):
        """One is slow: the rest goes on without it for as long as the buffer allows, then it ends too."""
        self.admit()
        if not self.model.in_flight:
            return
        slow = next(iter(self.model.in_flight.values()))
        is_bounded = math.isfinite(self.model.bound)
        for _ in range(self.model.config.max_staleness + 2 if is_bounded else 3):
            for _ in range(2 * self.model.bound if is_bounded else 2 * self.model.places):
                if self.model.may_admit():
                    self.admit()
                quick = [ticket for name, ticket in self.model.in_flight.items() if name != slow.episode_id]
                if quick:
                    self._end_well(quick[0], float(quick[0].member % 2), 0)
            self._take()
            self.load()
        self._end_well(slow, float(slow.member % 2), 0)
        self.let_all_end_well()

    @rule()
    def let_all_end_well(self):
        """Whatever failed before: once everything in flight ends well, a step can be taken."""
        self.load()
        while self._is_unfinished():
            while self.model.may_admit():
                self.admit()
            for ticket in list(self.model.in_flight.values()):
                self._end_well(ticket, float(ticket.member % 2), 0)
        assert self._take()

    @invariant()
    def no_more_than_the_bound_and_the_places(self):
        if not hasattr(self, "model"):
            return
        assert self.model.num_counted <= self.model.bound
        assert self.buffer.num_running == len(self.model.running) <= self.model.places

    def teardown(self):
        if not hasattr(self, "model"):
            return
        self.buffer.close({})
        ends = Counter(line.episode_id for line in self.lines)
        assert ends == Counter(self.model.dispatched)
        assert set(ends.values()) <= {1}
        assert all(line.outcome == "dropped" for line in self.lines if line.episode_id in self.model.failed)
        self.loop.close()

    def _is_unfinished(self) -> bool:
        """Whether episodes are to come before a step; without a bound they never end, so a step is enough."""
        if math.isfinite(self.model.bound):
            return self.model.may_admit() or bool(self.model.in_flight)
        return bool(self.model.in_flight) or not self.model.may_take()

    def _choose(self, data):
        return self.model.in_flight[data.draw(st.sampled_from(sorted(self.model.in_flight)))]

    def _end_well(self, ticket, reward, middle):
        episode = good_episode(ticket, reward, middle, self.model.loaded)
        self.loop.run_until_complete(self.buffer.settle(episode))
        self.model.settle(ticket, episode)

    def _take(self) -> bool:
        batch = self.loop.run_until_complete(attempt(self.buffer.take(*at(self.model.version))))
        if batch is None:
            assert self.model.config.staleness == "wait" or not self.model.may_take()
            return False
        entries = batch.episodes
        assert not {entry.episode_id for entry in entries} & self.model.failed
        self.model.take(batch)
        self.loop.run_until_complete(self.buffer.trained(*at(self.model.version)))
        return True


TestBufferMachine = BufferMachine.TestCase
TestBufferMachine.settings = settings(max_examples=200, stateful_step_count=30)
