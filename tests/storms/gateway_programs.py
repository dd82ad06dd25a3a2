"""Programs that call a gateway as agents do: by turns, with sub-agents, with histories that they change."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.storms.gateway_clients import Entry, Heard, HungUpError, Speakers, ask_in_ids, is_cut_off
from tests.storms.played_tree import PlainFormat, PlayedTree

SHORT_TOKENS = 40
_LONG_TOKENS = 400
_HANG_UP_SHARE = 0.3
_BREAKS_OFF = (0, 0, 1, 3, 6)
_SYSTEM = Entry("system", "You help.")


@dataclass(frozen=True)
class Line:
    """Who speaks: a dialect, and perhaps a header that tells it from another who asks the very same at once."""

    speaker: Any
    asker: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {self.speaker.asker: self.asker} if self.asker else {}


class Program:
    """What plays one episode; `counts` are of what it did: ``hung_up``, ``cut_off``, ``edited`` and the like.

    `again` are speakers whose connections are never cut: by them the same question is asked a second time, which
    nobody could tell from a call that was sent again because its answer was lost.
    """

    def __init__(self, speakers: Speakers, again: Speakers, form: PlainFormat, rng: random.Random) -> None:
        self._speakers, self._again, self._form, self._rng = speakers, again, form, rng
        self.tree = PlayedTree(form)
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self._num_askers = 0

    async def run(self) -> None:
        """Several conversations at once, in every dialect."""
        talks = [self._talk(Line(speaker), self._question(2, True), 2, True) for speaker in self._speakers.all]
        async with asyncio.TaskGroup() as group:
            for talk in (*talks, self._talk_in_ids(), self._ask_twice()):
                group.create_task(self._noting(talk))

    async def _noting(self, talk: Any) -> None:
        try:
            await talk
        except Exception as error:  # noqa: BLE001 - whatever a program is told is what the storm looks for
            self.errors += _described(error)

    def _question(self, left: int, may_spawn: bool = False) -> list[Entry]:
        """The beginning of a conversation that nobody else has."""
        directive = _directive(left, may_spawn)
        asks = Entry("user", f"Question {self._rng.getrandbits(40):010x}: what is the count? {directive}")
        return [_SYSTEM, asks] if self._rng.random() < 0.5 else [asks]

    async def _talk(self, line: Line, entries: list[Entry], left: int, may_spawn: bool = False) -> None:
        """Play a conversation to its end, now and then changing what has been said."""
        while True:
            most = SHORT_TOKENS if not left and self._rng.random() < 0.3 else None
            reply = await self._ask(line, entries, most)
            if not left:
                if most and self._rng.random() < 0.5:
                    after = [*entries, reply, Entry("user", f"Go on. {_directive(0)}")]
                    await self._ask(line, after, None)
                return
            left -= 1
            history, entries = entries, [*entries, reply, *await self._act(line, reply, left, may_spawn)]
            if any(name == "spawn" for _, name, _ in reply.heard.calls):
                may_spawn = False
            entries = await self._change(line, history, reply, entries, left)

    async def _act(self, line: Line, reply: Entry, left: int, may_spawn: bool) -> list[Entry]:
        """What a program puts behind a reply: the results of its calls, sub-agents among them."""
        assert reply.heard is not None
        results = []
        for call_id, name, _ in reply.heard.calls:
            if name == "spawn":
                await self._spawn(line)
            results.append(Entry("result", f"{self._rng.randrange(100)} rows {_directive(left, may_spawn)}", call_id))
        return results or [Entry("user", f"Go on. {_directive(left, may_spawn)}")]

    async def _spawn(self, line: Line) -> None:
        """Sub-agents at once, which ask the very same or not."""
        is_same = self._rng.random() < 0.5
        self.counts["spawned_alike" if is_same else "spawned"] += 2
        questions = [self._question(1)] * 2 if is_same else [self._question(1), self._question(1)]
        are_named = self._rng.random() < 0.5
        async with asyncio.TaskGroup() as group:
            for question in questions:
                self._num_askers += 1
                sub = Line(line.speaker, f"sub-{self._num_askers}" if are_named else "")
                group.create_task(self._talk(sub, question, 1))

    async def _change(
        self, line: Line, history: list[Entry], reply: Entry, entries: list[Entry], left: int
    ) -> list[Entry]:
        """The conversation as it goes on: mostly as it is."""
        assert reply.heard is not None
        chance = self._rng.random()
        if chance < 0.1:
            self.counts["edited"] += 1
            return [*history, Entry("said", "I have looked."), Entry("user", f"Go on. {_directive(left)}")]
        if chance < 0.2:
            self.counts["compacted"] += 1
            return [_SYSTEM, Entry("user", f"So far: {reply.heard.text[:30]!r}. Go on. {_directive(left)}")]
        if chance < 0.3:
            self.counts["gone_back"] += 1
            await self._ask(line, [*history, reply, Entry("user", f"Stop here. {_directive(0)}")], None)
        replies = [n for n, entry in enumerate(entries) if entry.kind == "reply"]
        if chance > 0.85 and len(replies) > 1:
            self.counts["shortened"] += 1
            return [*entries[: replies[0]], *entries[replies[1] :]]
        return entries

    async def _ask(self, line: Line, entries: Sequence[Entry], most: int | None) -> Entry:
        """One call, sent until it is answered."""
        streams = self._rng.random() < 0.5
        breaks_off = self._rng.choice(_BREAKS_OFF) if streams and self._rng.random() < _HANG_UP_SHARE else None
        while True:
            try:
                heard = await line.speaker.ask(entries, line.headers, streams, breaks_off, most)
                return self.tree.add(line.speaker.name, entries, heard)
            except HungUpError:
                self.counts["hung_up"] += 1
                # Some agents ask for a whole answer then.
                streams, breaks_off = self._rng.random() < 0.5, None
            except Exception as error:
                if not is_cut_off(error):
                    raise
                self.counts["cut_off"] += 1

    async def _ask_twice(self) -> None:
        """The same question again, once it has been answered: that is another call."""
        line = Line(self._rng.choice(self._again.all))
        question = self._question(0)
        for _ in range(2):
            heard = await line.speaker.ask(question, {}, self._rng.random() < 0.5, None, None)
            self.tree.add(line.speaker.name, question, heard)
        self.counts["asked_twice"] += 1

    async def _talk_in_ids(self) -> None:
        """A conversation whose program renders it."""
        prompt = self._form.ids(self._form.conversation(self._question(2)))
        for left in (1, 0, None):
            heard: Heard = await ask_in_ids(self._speakers.ids, prompt, _LONG_TOKENS)
            self.tree.add("token_ids", (), heard, prompt)
            piece = self._form.piece([Entry("user", f"Go on. {_directive(left or 0)}")])
            prompt = [*prompt, *heard.token_ids, *self._form.ids(f"\n{piece}")]


def _described(error: BaseException) -> list[str]:
    """An error, or those of a group, as words."""
    if isinstance(error, BaseExceptionGroup):
        return [words for inner in error.exceptions for words in _described(inner)]
    return [f"{type(error).__name__}: {error}"]


def _directive(left: int, may_spawn: bool = False) -> str:
    return f"[left {left}{' spawn' if may_spawn else ''}]"
