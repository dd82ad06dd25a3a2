"""The step loop: which requests run, when the next pass is computed, what pausing does to them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager

import numpy as np

from agentrl.engine.forward import Computed, ForwardPass, PassRunner
from agentrl.engine.model import ServedModel
from agentrl.engine.request import BadRequestError, Request
from agentrl.engine.slots import SlotTable
from agentrl.engine.steps import StepPlanner
from agentrl.types.weights import PauseMode

# A call takes several turns of the loop from its socket to its handler; with fewer, a pause waits for several steps.
_TURNS_BETWEEN_STEPS = 4


class Scheduler:
    """Runs requests over the slots of one model.

    A step is planned, and its tokens are appended, on the event loop; its forward pass may run in a thread, so that
    calls are answered meanwhile. Requests, weights and adapters are changed inside `between_steps` only.

    Invariants: a request is waiting, running (it owns a slot) or finished; a finished request's answer
    holds every token that was drawn for it; while paused no token is drawn.
    """

    def __init__(
        self, model: ServedModel, passes: PassRunner, num_slots: int, prefill_tokens: int, version: str
    ) -> None:
        self.model = model
        self.slots = SlotTable(num_slots)
        self._labels = [version]
        self._planner = StepPlanner(model, self.slots, self._labels, prefill_tokens)
        self._passes = passes
        self._between = asyncio.Lock()
        self._is_computing = False
        self._waiting: deque[Request] = deque()
        self._running = self._planner.running
        self._paused: PauseMode | None = None
        self._num_holds = 0
        self.refusal: Callable[[], str | None] = lambda: None
        self._wake = asyncio.Event()
        self._still = asyncio.Event()
        self._still.set()

    @property
    def version(self) -> str:
        """Label of the weights that are served."""
        return self._labels[-1]

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

    @property
    def computing_s(self) -> float:
        """For how long the step under way has been computed; 0 between two."""
        return self._passes.computing_s

    def in_flight(self) -> list[Request]:
        """Requests that wait or run."""
        return [*self._waiting, *self._running.values()]

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            BadRequestError: its id is in flight already, it cannot fit, or `refusal` gives a reason to refuse all.
                Under a pause requests wait, whatever is missing.
        """
        if self._paused is None and (reason := self.refusal()) is not None:
            raise BadRequestError(reason)
        if any(request.rid == other.rid for other in self.in_flight()):
            raise BadRequestError(f"duplicate request id in flight: {request.rid}")
        limit = self.model.context_length
        if len(request.prompt_ids) + (request.params.max_new_tokens > 0) > limit:
            raise BadRequestError(f"prompt of {len(request.prompt_ids)} tokens leaves no room in a context of {limit}")
        self._waiting.append(request)
        self._wake.set()

    def abort(self, rid: str | None) -> int:
        """End the request of exactly this id, or all; returns how many. Unknown ids are no error."""
        self._check_is_between_steps()
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
        self._check_is_between_steps()
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
        self._check_is_between_steps()
        if self._running:
            return False
        self.slots.flush()
        return True

    def loaded(self, version: str | None) -> None:
        """The model's weights have just changed; cached KV is of the old ones from now on."""
        self._check_is_between_steps()
        self._labels.append(version or self.version)

    def relabel(self, version: str) -> None:
        """Rename the weights that are served; their KV stays theirs."""
        self._check_is_between_steps()
        self._labels[-1] = version

    @contextmanager
    def held_queue(self) -> Iterator[None]:
        """Start no waiting request inside the block; running ones go on."""
        self._num_holds += 1
        try:
            yield
        finally:
            self._num_holds -= 1
            self._wake.set()

    def loop_needed(self) -> AbstractContextManager[None]:
        """Compute every step in a thread inside the block, so that calls are answered during short ones too."""
        return self._passes.loop_needed()

    def between_steps(self) -> AbstractAsyncContextManager[None]:
        """No step runs inside the block; callers enter in the order in which they came.

        Waits for: the step under way and earlier callers. Unblocked by: their ends.
        """
        return self._between

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Between two steps with nothing running, unless paused; the queue is held back until it ends.

        Waits for: running requests. Unblocked by: their end, or a pause.
        """
        with self.held_queue():
            await self._until_still()
            try:
                yield
            finally:
                self._between.release()

    async def run(self) -> None:
        """Step for ever.

        Waits for: a request, the end of a pause, or of a `between_steps`. Unblocked by: submit, resume, that end.
        """
        while True:
            if not self._can_step():
                self._wake.clear()
                await self._wake.wait()
            async with self._between:
                if self._can_step():
                    await self._step()
            for _ in range(_TURNS_BETWEEN_STEPS):
                await asyncio.sleep(0)

    def begin_step(self) -> ForwardPass:
        """Admit what fits, and plan one forward pass."""
        while self._waiting and not self._num_holds and self._admit(self._waiting[0]):
            self._waiting.popleft()
        self._is_computing = True
        return self._planner.plan()

    def end_step(self, planned: ForwardPass, computed: Computed) -> None:
        """Append what the pass drew to its requests."""
        self._is_computing = False
        self._planner.commit(planned, computed)
        if not self._running:
            self._still.set()

    async def _until_still(self) -> None:
        """Acquires `between_steps`."""
        while True:
            while self._running and self._paused is None:
                self._still.clear()
                await self._still.wait()
            await self._between.acquire()
            if self._paused is not None or not self._running:
                return
            self._between.release()

    async def _step(self) -> None:
        planned = self.begin_step()
        self.end_step(planned, await self._passes.run(planned))

    def _can_step(self) -> bool:
        can_admit = bool(self._waiting) and not self._num_holds
        return self._paused is None and (bool(self._running) or can_admit)

    def _check_is_between_steps(self) -> None:
        if self._is_computing:
            raise RuntimeError("a step is being computed; wait in between_steps() before this")

    def _admit(self, request: Request) -> bool:
        context = np.asarray(request.prompt_ids + request.output_ids, np.int32)
        taken = self.slots.acquire(context, len(self._labels) - 1, request.adapter)
        if taken is None:
            return False
        slot, reusable, source = taken
        if request.score_from is not None:
            reusable = 0
            self.slots.lengths[slot] = 0
            request.prompt_logprobs.clear()
        self._planner.begin(request, slot, reusable, source)
        return True

    def _retract(self) -> None:
        for request in list(self._running.values())[::-1]:
            self._drop(request)
            request.retractions += 1
            self._waiting.appendleft(request)

    def _drop(self, request: Request) -> None:
        """Take a request off its slot, whose tokens stay for reuse."""
        if request.slot is not None:
            self._planner.drop(request)
        if not self._running:
            self._still.set()
