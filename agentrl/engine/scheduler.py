"""The step loop: which requests run, what one forward pass computes, what pausing does to them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from agentrl.engine.model import ServedModel
from agentrl.engine.pause import PauseMode
from agentrl.engine.request import BadRequestError, Request
from agentrl.engine.sampler import draw
from agentrl.engine.slots import SlotTable


class Scheduler:
    """Runs requests over the slots of one model.

    Invariants: a request is waiting, running (it owns a slot) or finished; a finished request's answer
    holds every token that was drawn for it; while paused no token is drawn.
    """

    def __init__(self, model: ServedModel, num_slots: int, prefill_tokens: int, rounds: bool, version: str) -> None:
        self.model = model
        self.version = version
        self.slots = SlotTable(num_slots)
        self._prefill_tokens = prefill_tokens
        self._rounds = rounds
        self._labels = [version]
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._paused: PauseMode | None = None
        self._num_holds = 0
        self.refusal: Callable[[], str | None] = lambda: None
        self._prefilled_last = False
        self._wake = asyncio.Event()
        self._still = asyncio.Event()
        self._still.set()

    @property
    def pause_mode(self) -> PauseMode | None:
        """How the engine is paused; None while it generates."""
        return self._paused

    @property
    def num_running(self) -> int:
        """Requests that own a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            BadRequestError: its id is in flight already, it cannot fit, or there is a `refusal` of all.
        """
        if (reason := self.refusal()) is not None:
            raise BadRequestError(reason)
        if any(request.rid == other.rid for other in self._in_flight()):
            raise BadRequestError(f"duplicate request id in flight: {request.rid}")
        limit = self.model.context_length
        if len(request.prompt_ids) + (request.params.max_new_tokens > 0) > limit:
            raise BadRequestError(f"prompt of {len(request.prompt_ids)} tokens leaves no room in a context of {limit}")
        self._waiting.append(request)
        self._wake.set()

    def abort(self, rid: str | None) -> int:
        """End the request of exactly this id, or all; returns how many. Unknown ids are no error."""
        waiting = [r for r in self._waiting if rid in (None, r.rid)]
        running = [r for r in self._running.values() if rid in (None, r.rid)]
        for request in waiting:
            self._waiting.remove(request)
            request.finish({"type": "abort", "message": "Abort in waiting queue"})
        for request in running:
            self._drop(request)
            request.finish({"type": "abort", "message": "Aborted"})
        return len(waiting) + len(running)

    def pause(self, mode: PauseMode) -> int:
        """Stop drawing tokens; returns how many requests were interrupted. Pausing again changes nothing."""
        if self._paused is not None:
            return 0
        self._paused = mode
        interrupted = len(self._running)
        if mode is PauseMode.ABORT:
            interrupted = self.abort(None)
        if mode is PauseMode.RETRACT:
            self._retract()
        self._still.set()
        return interrupted

    def resume(self) -> None:
        """Draw tokens again; no error if not paused."""
        self._paused = None
        self._wake.set()

    def flush(self) -> bool:
        """Forget all cached KV; False, and nothing changes, while requests own slots."""
        if self._running:
            return False
        self.slots.flush()
        return True

    def loaded(self, version: str | None) -> None:
        """The model's weights have just changed; cached KV is of the old ones from now on."""
        self.version = version or self.version
        self._labels.append(self.version)

    def relabel(self, version: str) -> None:
        """Rename the weights that are served; their KV stays theirs."""
        self.version = version
        self._labels[-1] = version

    @contextmanager
    def held_queue(self) -> Iterator[None]:
        """Let no request begin meanwhile; those that run go on."""
        self._num_holds += 1
        try:
            yield
        finally:
            self._num_holds -= 1
            self._wake.set()

    async def wait_until_still(self) -> None:
        """Hold back the queue until nothing runs, unless paused already.

        Waits for: running requests. Unblocked by: their end, or a pause.
        """
        with self.held_queue():
            while self._running and self._paused is None:
                self._still.clear()
                await self._still.wait()

    async def run(self) -> None:
        """Step for ever, letting handlers run between steps.

        Waits for: a request, or the end of a pause. Unblocked by: submit, resume.
        """
        while True:
            can_admit = self._waiting and not self._num_holds
            if self._paused is not None or not (self._running or can_admit):
                self._wake.clear()
                await self._wake.wait()
            if self._paused is None:
                self.step()
            await asyncio.sleep(0)

    def step(self) -> None:
        """Admit what fits, then one forward pass."""
        while self._waiting and not self._num_holds and self._admit(self._waiting[0]):
            self._waiting.popleft()
        pending = {slot: self._num_pending(slot) for slot in self._running}
        prefill = [
            slot for slot, count in pending.items() if count > 1 or self._running[slot].params.max_new_tokens == 0
        ]
        decode = len(prefill) < len(pending)
        if prefill and not (decode and self._prefilled_last):
            self._step_prefill(prefill)
        elif decode:
            self._step_decode(set(pending) - set(prefill))
        self._prefilled_last = not self._prefilled_last

    def _admit(self, request: Request) -> bool:
        context = np.asarray(request.prompt_ids + request.output_ids, np.int32)
        origin = len(self._labels) - 1
        taken = self.slots.acquire(context, origin)
        if taken is None:
            return False
        slot, reusable, source = taken
        if request.score_from is not None:
            reusable = 0
            self.slots.lengths[slot] = 0
            request.prompt_logprobs.clear()
        if reusable and source != slot:
            self.model.cache.copy_prefix(source, slot, reusable)
        request.slot, request.cached_tokens = slot, reusable
        self._running[slot] = request
        return True

    def _step_prefill(self, slots: list[int]) -> None:
        """Compute pending prompt tokens of as many requests as the budget holds, oldest first."""
        pieces: list[list[int]] = []
        for slot in slots:
            piece = self._running[slot].pending(int(self.slots.lengths[slot]))[: self._prefill_tokens]
            widest = max([len(piece), *map(len, pieces)])
            if pieces and widest * (len(pieces) + 1) > self._prefill_tokens:
                break
            pieces.append(piece)
        rows = np.asarray(slots[: len(pieces)])
        width = max(map(len, pieces))
        ids = np.zeros((len(rows), width), np.int64)
        for row, piece in enumerate(pieces):
            ids[row, : len(piece)] = piece
        sizes = np.asarray([len(piece) for piece in pieces])
        hidden = self.model.forward(rows, ids, self.slots.lengths[rows])
        self._score_prompts(rows, sizes, hidden, ids)
        self.slots.lengths[rows] += sizes
        ready = [row for row, slot in enumerate(rows) if self._num_pending(int(slot)) == 0]
        if ready:
            self._commit(rows[ready], hidden[ready, sizes[ready] - 1])

    def _step_decode(self, slots: set[int]) -> None:
        """One token for every request in `slots`.

        Mostly these are all slots up to the last busy one, and computing the few between them as well
        is cheaper than gathering the KV of some; what that writes is behind those slots' own tokens.
        """
        active = np.asarray(sorted(slots))
        rows = np.arange(self.slots.num_rows)
        is_dense = len(rows) <= 2 * len(active)
        if not is_dense or self.slots.lengths[rows].max() > self.slots.lengths[active].max():
            rows = active
        starts = self.slots.lengths[rows]
        last_column = self.slots.tokens.shape[1] - 1
        ids = self.slots.tokens[rows, np.minimum(starts, last_column)][:, None].astype(np.int64)
        hidden = self.model.forward(slice(0, len(rows)) if len(rows) == rows[-1] + 1 else rows, ids, starts)
        self.slots.lengths[active] += 1
        self._commit(active, hidden[np.searchsorted(rows, active), 0])

    def _commit(self, slots: np.ndarray, hidden: object) -> None:
        """Draw a token for each slot's request and end those that are done."""
        requests = [self._running[int(slot)] for slot in slots]
        wanted = [r.params.max_new_tokens > 0 for r in requests]
        if not all(wanted):
            for request in (r for r, w in zip(requests, wanted, strict=True) if not w):
                self._end(request, {"type": "length", "length": 0})
            slots, hidden = slots[wanted], hidden[np.flatnonzero(wanted)]  # type: ignore[index]
            requests = [r for r, w in zip(requests, wanted, strict=True) if w]
        if not requests:
            return
        positions = np.asarray([r.num_context for r in requests])
        drawn = draw(self.model.logits(hidden), [r.params for r in requests], positions, self._rounds)  # type: ignore[arg-type]
        self.slots.append(slots, np.asarray(drawn.tokens, np.int32))
        for row, request in enumerate(requests):
            kv_label = self._labels[int(self.slots.origin[slots[row]])]
            request.append(drawn.tokens[row], drawn.logprobs[row], self.version, kv_label)
            kept = drawn.kept_ids[row]
            if request.wants_mask and kept is not None:
                request.kept_ids.append(kept)
                request.kept_logprobs.append(drawn.kept_logprobs[row] or 0.0)
            self._end_if_done(request)

    def _end_if_done(self, request: Request) -> None:
        token, num_output = request.output_ids[-1], len(request.output_ids)
        if token in request.params.stop_token_ids:
            self._end(request, {"type": "stop", "matched": token})
        elif num_output >= request.params.max_new_tokens or request.num_context >= self.model.context_length:
            self._end(request, {"type": "length", "length": num_output})
        else:
            request.on_change()

    def _end(self, request: Request, reason: dict[str, object]) -> None:
        self._drop(request)
        request.finish(reason)

    def _score_prompts(self, rows: np.ndarray, sizes: np.ndarray, hidden: object, ids: np.ndarray) -> None:
        """Log-probabilities of prompt tokens for requests that asked for them, piece by piece."""
        for row, slot in enumerate(rows):
            request = self._running[int(slot)]
            if request.score_from is None:
                continue
            start, size = int(self.slots.lengths[slot]), int(sizes[row])
            targets = request.prompt_ids[start + 1 : start + size + 1]
            if not request.prompt_logprobs:
                request.prompt_logprobs.append(None)
            logprobs = self.model.logits(hidden[row, : len(targets)]).log_softmax(-1)  # type: ignore[index]
            request.prompt_logprobs += [float(logprobs[i, token]) for i, token in enumerate(targets)]

    def _retract(self) -> None:
        for request in list(self._running.values())[::-1]:
            self._drop(request)
            request.retractions += 1
            self._waiting.appendleft(request)

    def _drop(self, request: Request) -> None:
        """Take a request off its slot, whose tokens stay for reuse."""
        if request.slot is not None:
            del self._running[request.slot]
            self.slots.release(request.slot)
            request.slot = None
        if not self._running:
            self._still.set()

    def _num_pending(self, slot: int) -> int:
        return self._running[slot].num_context - int(self.slots.lengths[slot])

    def _in_flight(self) -> list[Request]:
        return [*self._waiting, *self._running.values()]
