"""Any interleaving of questions, answers, failures and turns that nobody needs any more, against a line at work."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentrl.scoring import queue as queue_module
from agentrl.scoring.queue import UNREACHABLE
from agentrl.testing.scorers import length_score
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.turn_score import ScoredTurn, TurnKey, TurnScore
from tests.unit.scoring.scoring_parts import Line, a_turn

EPISODES, CONTEXTS, CACHED, SLOTS, BATCH = 3, 4, 3, 2, 2
WRONG = ("nan", "other", "missing", "mixed")
ANSWERS = ("good", "reversed", "twice", "stray", *WRONG, "failed", "unreachable")


@dataclass(eq=False)
class Sent:
    """A batch that a worker has, and what it will say."""

    turns: Sequence[ScoredTurn]
    answers: asyncio.Future[Sequence[TurnScore]] = field(default_factory=lambda: asyncio.Future())


class LineMachine(RuleBasedStateMachine):
    """Answers come when a rule lets them; `waited` are the scores that somebody waits for, by turn."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.patches = [
            mock.patch.object(queue_module, "_FIRST_PAUSE_S", 0.0),
            mock.patch.object(queue_module, "_CACHED", CACHED),
        ]
        for patch in self.patches:
            patch.start()
        self.open: list[Sent] = []
        self.waited: dict[TurnKey, asyncio.Future[TurnScore]] = {}
        self.turns: dict[TurnKey, ScoredTurn] = {}
        self.sent: Counter[TurnKey] = Counter()
        self.may_be_sent: Counter[TurnKey] = Counter()
        self.version = 0

    @initialize()
    def start(self) -> None:
        self.loop.run_until_complete(self._start())

    async def _start(self) -> None:
        self.line = Line(self._score, batch_turns=BATCH, concurrency=SLOTS, pool={"max_waiting": 3, "queue_s": 1000.0})
        await self.line.queue.open()
        self.running = asyncio.create_task(self.line.queue.run())

    async def _score(self, turns: Sequence[ScoredTurn]) -> Sequence[TurnScore]:
        batch = Sent(turns)
        self.open.append(batch)
        self.sent.update(turn.key for turn in turns)
        return await batch.answers

    def _go_on(self) -> None:
        async def some_turns() -> None:
            for _ in range(25):
                await asyncio.sleep(0)

        self.loop.run_until_complete(some_turns())

    @rule(
        episode=st.integers(0, EPISODES - 1), number=st.integers(0, 3), context=st.integers(0, CONTEXTS - 1),
        lets_go_on=st.booleans(),
    )  # fmt: skip
    def ask(self, episode: int, number: int, context: int, lets_go_on: bool) -> None:
        self.loop.run_until_complete(self._ask(a_turn(number, f"episode-{episode}", context)))
        if lets_go_on:
            self._go_on()

    async def _ask(self, turn: ScoredTurn) -> None:
        # On the loop: a score may be kept in the very turn of it in which a question is asked.
        if any(score.key == turn.key for _, score in self.line.kept):
            return  # the tier asks about no turn that it has a score of
        before = self.waited.get(turn.key)
        self.turns[turn.key] = turn
        self.may_be_sent[turn.key] += before is None or before.done()
        self.waited[turn.key] = self.line.queue.ask(turn)
        assert before is None or before.done() or self.waited[turn.key] is before

    @precondition(lambda self: self.waited)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        episode = data.draw(st.sampled_from(sorted({key.episode_id for key in self.waited})))
        self.line.queue.forget([key for key in self.waited if key.episode_id == episode])
        self._go_on()

    @precondition(lambda self: self.open)
    @rule(data=st.data(), how=st.sampled_from(ANSWERS))
    def answer(self, data: st.DataObject, how: str) -> None:
        batch = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        if how == "failed":
            batch.answers.set_exception(EpisodeError(Boundary.SCORER, "died", "signal 9"))
        elif how == "unreachable":
            self.may_be_sent.update(turn.key for turn in batch.turns)
            batch.answers.set_exception(EpisodeError(Boundary.SCORER, UNREACHABLE, "connection refused"))
        else:
            batch.answers.set_result(self._answers(batch.turns, how))
        self._go_on()

    def _answers(self, turns: Sequence[ScoredTurn], how: str) -> list[TurnScore]:
        good = [length_score(turn, f"v{self.version}") for turn in turns]
        match how:
            case "reversed":
                return good[::-1]
            case "twice":
                return [*good, replace(good[0], value=-1.0)]
            case "stray":
                return [length_score(a_turn(99, "nobody")), *good]
            case "nan":
                return [replace(good[0], value=float("nan")), *good[1:]]
            case "other":
                return [replace(good[0], key=replace(good[0].key, digest="0" * 24)), *good[1:]]
            case "missing":
                return good[1:]
            case "mixed":
                return [replace(good[0], version="older"), *good[1:]]
        return good

    @rule()
    def publish(self) -> None:
        self.version += 1

    @invariant()
    def a_score_is_of_its_own_turn(self) -> None:
        if not hasattr(self, "line"):
            return
        told = [(key, f.result()) for key, f in self.waited.items() if f.done() and not f.cancelled()]
        kept = [(score.key, score) for _, score in self.line.kept]
        assert len({key for key, _ in kept}) == len(kept), "at most one score of a turn"
        for key, score in [*told, *kept]:
            assert score.key == key
            if score.failure is None:
                assert score.value == len(self.turns[key].token_ids) / 1000, "nothing is invented or mixed up"
            else:
                assert score.value is None
                assert score.prior is None
        on_record = {key for key, _ in kept}
        assert all(score.failure is not None or key in on_record for key, score in told)

    @invariant()
    def no_turn_is_sent_more_often_than_it_was_asked_about(self) -> None:
        assert all(self.sent[key] <= self.may_be_sent[key] for key in self.sent)
        in_hands = [turn.key for batch in self.open for turn in batch.turns]
        assert len(set(in_hands)) == len(in_hands)

    @invariant()
    def memory_is_bounded_by_what_is_waited_for(self) -> None:
        if not hasattr(self, "line"):
            return
        queue = self.line.queue
        assert not self.running.done()
        assert len(queue._in_flight) <= SLOTS * BATCH
        assert set(queue._waiting) <= {key for key, future in self.waited.items() if not future.done()}
        assert len(queue._cache) <= CACHED
        assert queue._has_room.is_set() == (queue.num_waiting < 3)

    def teardown(self) -> None:
        try:
            if hasattr(self, "line"):
                self._end()
        finally:
            for patch in self.patches:
                patch.stop()
            self.loop.close()

    def _end(self) -> None:
        """Every turn that is still waited for has an answer in the end."""
        self._go_on()
        while self.open:
            batch = self.open.pop()
            batch.answers.set_result(self._answers(batch.turns, "good"))
            self._go_on()
        assert all(future.done() for future in self.waited.values())
        self.a_score_is_of_its_own_turn()
        self.running.cancel()
        self.loop.run_until_complete(asyncio.wait([self.running]))


TestLine = LineMachine.TestCase
TestLine.settings = settings(max_examples=60, stateful_step_count=40)
