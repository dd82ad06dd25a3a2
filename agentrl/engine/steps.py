"""One step of the loop: which tokens one forward pass computes, and what it draws."""

from __future__ import annotations

import numpy as np

from agentrl.engine.model import ServedModel
from agentrl.engine.request import Request
from agentrl.engine.sampler import draw
from agentrl.engine.slots import SlotTable


class WeightLabels:
    """Labels of the weights that were loaded, oldest first; an origin is a place among them."""

    def __init__(self, first: str) -> None:
        self._labels = [first]

    @property
    def newest(self) -> str:
        """Label of the weights that are served."""
        return self._labels[-1]

    @property
    def origin(self) -> int:
        """Origin of KV that is made now."""
        return len(self._labels) - 1

    def of(self, origin: int) -> str:
        """Label of the weights that made KV."""
        return self._labels[origin]

    def append(self, label: str) -> None:
        """Other weights are served from now on."""
        self._labels.append(label)

    def rename(self, label: str) -> None:
        """The weights that are served have another label."""
        self._labels[-1] = label


class StepRunner:
    """Computes and draws for the requests that own slots; ends those that are done."""

    def __init__(
        self, model: ServedModel, slots: SlotTable, labels: WeightLabels, prefill_tokens: int, rounds: bool
    ) -> None:
        self.running: dict[int, Request] = {}
        self._model = model
        self._slots = slots
        self._labels = labels
        self._prefill_tokens = prefill_tokens
        self._rounds = rounds
        self._prefilled_last = False

    def step(self) -> None:
        """One forward pass: pending prompt pieces and single tokens take turns."""
        pending = {slot: self._num_pending(slot) for slot in self.running}
        prefill = [
            slot for slot, count in pending.items() if count > 1 or self.running[slot].params.max_new_tokens == 0
        ]
        decode = len(prefill) < len(pending)
        if prefill and not (decode and self._prefilled_last):
            self._step_prefill(prefill)
        elif decode:
            self._step_decode(set(pending) - set(prefill))
        self._prefilled_last = not self._prefilled_last

    def drop(self, request: Request) -> None:
        """Take a request off its slot, whose tokens stay for reuse."""
        slot = request.slot
        if slot is None:
            return
        if request.routed_from is not None and self._model.routing is not None:
            num_known = min(int(self._slots.lengths[slot]), request.num_context - 1)
            request.keep_routing(self._model.routing.read(slot, num_known))
        del self.running[slot]
        self._slots.release(slot)
        request.slot = None

    def _step_prefill(self, slots: list[int]) -> None:
        """Compute pending prompt tokens of as many requests as the budget holds, oldest first."""
        pieces: list[list[int]] = []
        for slot in slots:
            piece = self.running[slot].pending(int(self._slots.lengths[slot]))[: self._prefill_tokens]
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
        hidden = self._model.forward(rows, ids, self._slots.lengths[rows], self._slots.adapter[rows])
        self._score_prompts(rows, sizes, hidden, ids)
        self._slots.lengths[rows] += sizes
        ready = [row for row, slot in enumerate(rows) if self._num_pending(int(slot)) == 0]
        if ready:
            self._commit(rows[ready], hidden[ready, sizes[ready] - 1])

    def _step_decode(self, slots: set[int]) -> None:
        """One token for every request in `slots`.

        Mostly these are all slots up to the last busy one, and computing the few between them as well
        is cheaper than gathering the KV of some; what that writes is behind those slots' own tokens.
        """
        active = np.asarray(sorted(slots))
        rows = np.arange(self._slots.num_rows)
        is_dense = len(rows) <= 2 * len(active)
        if not is_dense or self._slots.lengths[rows].max() > self._slots.lengths[active].max():
            rows = active
        starts = self._slots.lengths[rows]
        last_column = self._slots.tokens.shape[1] - 1
        ids = self._slots.tokens[rows, np.minimum(starts, last_column)][:, None].astype(np.int64)
        is_slice = len(rows) == rows[-1] + 1
        hidden = self._model.forward(slice(0, len(rows)) if is_slice else rows, ids, starts, self._slots.adapter[rows])
        self._slots.lengths[active] += 1
        self._commit(active, hidden[np.searchsorted(rows, active), 0])

    def _commit(self, slots: np.ndarray, hidden: object) -> None:
        """Draw a token for each slot's request and end those that are done."""
        requests = [self.running[int(slot)] for slot in slots]
        wanted = [r.params.max_new_tokens > 0 for r in requests]
        if not all(wanted):
            for request in (r for r, w in zip(requests, wanted, strict=True) if not w):
                self._end(request, {"type": "length", "length": 0})
            slots, hidden = slots[wanted], hidden[np.flatnonzero(wanted)]  # type: ignore[index]
            requests = [r for r, w in zip(requests, wanted, strict=True) if w]
        if not requests:
            return
        positions = np.asarray([r.num_context for r in requests])
        drawn = draw(self._model.logits(hidden), [r.params for r in requests], positions, self._rounds)  # type: ignore[arg-type]
        self._slots.append(slots, np.asarray(drawn.tokens, np.int32))
        for row, request in enumerate(requests):
            kv_label = self._labels.of(int(self._slots.origin[slots[row]]))
            request.append(drawn.tokens[row], drawn.logprobs[row], self._labels.newest, kv_label)
            kept = drawn.kept_ids[row]
            if request.wants_mask and kept is not None:
                request.kept_ids.append(kept)
                request.kept_logprobs.append(drawn.kept_logprobs[row] or 0.0)
            self._end_if_done(request)

    def _end_if_done(self, request: Request) -> None:
        token, num_output = request.output_ids[-1], len(request.output_ids)
        if token in request.params.stop_token_ids:
            self._end(request, {"type": "stop", "matched": token})
        elif num_output >= request.params.max_new_tokens or request.num_context >= self._model.context_length:
            self._end(request, {"type": "length", "length": num_output})
        else:
            request.on_change()

    def _end(self, request: Request, reason: dict[str, object]) -> None:
        self.drop(request)
        request.finish(reason)

    def _score_prompts(self, rows: np.ndarray, sizes: np.ndarray, hidden: object, ids: np.ndarray) -> None:
        """Log-probabilities of prompt tokens for requests that asked for them, piece by piece."""
        for row, slot in enumerate(rows):
            request = self.running[int(slot)]
            if request.score_from is None:
                continue
            start, size = int(self._slots.lengths[slot]), int(sizes[row])
            targets = request.prompt_ids[start + 1 : start + size + 1]
            if not request.prompt_logprobs:
                request.prompt_logprobs.append(None)
            logprobs = self._model.logits(hidden[row, : len(targets)]).log_softmax(-1)  # type: ignore[index]
            request.prompt_logprobs += [float(logprobs[i, token]) for i, token in enumerate(targets)]

    def _num_pending(self, slot: int) -> int:
        return self.running[slot].num_context - int(self._slots.lengths[slot])
