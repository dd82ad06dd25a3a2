"""An engine with continuous batching: all sequences advance at one speed, which falls with their number."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl.sizing.clock import Clock
from agentrl.sizing.latencies import Latencies


@dataclass(slots=True)
class Reply:
    """A reply under way. `spans` has the tokens that each version wrote; tokens are counted in fractions of one."""

    prompt_tokens: float
    tokens: float
    on_end: Callable[[], None]
    spans: list[tuple[int, float]]
    counted_at: float = 0.0
    """What each sequence had been given in all when its tokens were last counted."""
    ends_at: float = field(default=0.0)


class SimulatedEngine:
    """One engine.

    `given` is the number of tokens that a sequence would have got that had been there from the start; a reply that
    joins at ``given = g`` ends at ``g + tokens``. So one event, the next end, is all that must be kept right.
    """

    def __init__(self, clock: Clock, latencies: Latencies) -> None:
        self._clock, self._decode = clock, latencies.decode
        self._slots, self._prefill_token_s = latencies.engine_slots.value, latencies.prefill_token_s.value
        self.version = 0
        self.load = 0
        """Sequences of this engine, those that wait for a slot too."""
        self.busy_s = 0.0
        """With at least one sequence, pauses left out."""
        self.tokens = 0.0
        self._given, self._counted_s, self._stalled_until = 0.0, 0.0, 0.0
        self._running: list[tuple[float, int, Reply]] = []
        self._waiting: deque[Reply] = deque()
        self._order, self._setting = itertools.count(), 0
        self._is_paused = False

    def begin(self, reply: Reply) -> None:
        """Generate a reply as soon as there is a slot."""
        self._advance()
        self.load += 1
        self._waiting.append(reply)
        self._fill()
        self._set()

    @property
    def num_running(self) -> int:
        """Sequences that a pause interrupts."""
        return len(self._running)

    def pause(self) -> None:
        """Stand still."""
        self._advance()
        self._is_paused = True

    def resume(self, version: int) -> None:
        """Go on, with these weights; what was in flight is computed anew before."""
        self._advance()
        self._is_paused = False
        if version != self.version:
            held = sum(reply.prompt_tokens + self._count(reply) for _, _, reply in self._running)
            self._stall(held * self._prefill_token_s)
            self.version = version
        self._set()

    def _count(self, reply: Reply) -> float:
        """Give a reply the tokens since the last count to the version that wrote them; returns them."""
        written = self._given - reply.counted_at
        reply.counted_at = self._given
        if written > 0:
            reply.spans.append((self.version, written))
        return written

    def _advance(self) -> None:
        """Bring `given` up to now."""
        now = self._clock.now
        since, self._counted_s = max(self._counted_s, min(self._stalled_until, now)), now
        if self._running and not self._is_paused and now > since:
            number = len(self._running)
            given = (now - since) / self._decode.token_s(number)
            self._given += given
            self.tokens += given * number
            self.busy_s += now - since

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            reply = self._waiting.popleft()
            reply.counted_at, reply.ends_at = self._given, self._given + reply.tokens
            heapq.heappush(self._running, (reply.ends_at, next(self._order), reply))
            self._stall(reply.prompt_tokens * self._prefill_token_s)

    def _stall(self, seconds: float) -> None:
        if seconds > 0:
            self._stalled_until = max(self._stalled_until, self._clock.now) + seconds
            self.busy_s += seconds

    def _set(self) -> None:
        """Set the event of the next end, in place of the one that was set before."""
        self._setting += 1
        if self._is_paused or not self._running:
            return
        left = max(self._running[0][0] - self._given, 0.0)
        stall_s = max(self._stalled_until - self._clock.now, 0.0)
        setting = self._setting
        self._clock.after(stall_s + left * self._decode.token_s(len(self._running)), lambda: self._end(setting))

    def _end(self, setting: int) -> None:
        if setting != self._setting:
            return
        self._advance()
        # Rounding may leave a little of the reply that was to end: at least that one ends.
        self._given = max(self._given, self._running[0][0])
        while self._running and self._running[0][0] <= self._given + 1e-9:
            reply = heapq.heappop(self._running)[2]
            self._count(reply)
            self.load -= 1
            self._clock.after(0.0, reply.on_end)
        self._fill()
        self._set()
