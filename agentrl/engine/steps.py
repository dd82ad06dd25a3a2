"""Plans forward passes, and appends what they drew to their requests."""

from __future__ import annotations

import numpy as np

from agentrl.engine.forward import Computed, Draws, ForwardPass, PrefixCopy, PromptScores
from agentrl.engine.model import ServedModel
from agentrl.engine.request import Request
from agentrl.engine.sampler import Draw
from agentrl.engine.slots import SlotTable


class StepPlanner:
    """Plans passes for the requests that own slots, applies their results, and ends requests that are done.

    Invariant: between a plan and its `commit` no request takes or leaves a slot.
    """

    def __init__(self, model: ServedModel, slots: SlotTable, labels: list[str], prefill_tokens: int) -> None:
        """`labels` are those of all weights that were loaded; the last ones are served, and slots have places in it."""
        self.running: dict[int, Request] = {}
        self._model = model
        self._slots = slots
        self._labels = labels
        self._prefill_tokens = prefill_tokens
        self._prefilled_last = False
        self._copies: list[PrefixCopy] = []

    def begin(self, request: Request, slot: int, num_cached: int, source: int) -> None:
        """Start a request in its slot; the KV of its first `num_cached` tokens is copied from slot `source`."""
        if num_cached and source != slot:
            self._copies.append(PrefixCopy(source, slot, num_cached))
        request.slot, request.cached_tokens = slot, num_cached
        self.running[slot] = request

    def plan(self) -> ForwardPass:
        """The next pass, of at least one request: pending prompt pieces and single tokens take turns."""
        pending = {slot: self._num_pending(slot) for slot in self.running}
        prefill = [
            slot for slot, count in pending.items() if count > 1 or self.running[slot].params.max_new_tokens == 0
        ]
        decode = len(prefill) < len(pending)
        is_prefill = bool(prefill) and not (decode and self._prefilled_last)
        self._prefilled_last = not self._prefilled_last
        return self._prefill(prefill) if is_prefill else self._decode(sorted(set(pending) - set(prefill)))

    def commit(self, planned: ForwardPass, computed: Computed) -> None:
        """Apply what a pass computed, and end the requests that are done."""
        self._slots.lengths[planned.slots] += planned.sizes
        for score, logprobs in zip(planned.scores, computed.logprobs, strict=True):
            scored = self.running[score.slot].prompt_logprobs
            scored += logprobs if scored else [None, *logprobs]
        for request in [self.running[slot] for slot in planned.slots.tolist()]:
            if request.params.max_new_tokens == 0 and request.num_context == self._slots.lengths[request.slot]:
                self._end(request, {"type": "length", "length": 0})
        if planned.draws is not None and computed.drawn is not None:
            self._append(planned.draws.slots, computed.drawn)

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

    def _prefill(self, waiting: list[int]) -> ForwardPass:
        """Pending prompt tokens of as many requests as the budget holds, oldest first."""
        pieces: list[list[int]] = []
        for slot in waiting:
            piece = self.running[slot].pending(int(self._slots.lengths[slot]))[: self._prefill_tokens]
            widest = max([len(piece), *map(len, pieces)])
            if pieces and widest * (len(pieces) + 1) > self._prefill_tokens:
                break
            pieces.append(piece)
        slots = np.asarray(waiting[: len(pieces)])
        ids_BT = np.zeros((len(slots), max(map(len, pieces))), np.int64)
        for row, piece in enumerate(pieces):
            ids_BT[row, : len(piece)] = piece
        sizes = np.asarray([len(piece) for piece in pieces])
        rows = np.asarray([row for row, size in enumerate(sizes) if self._draws_behind(waiting[row], size)], np.int64)
        return ForwardPass(
            rows=slots,
            ids_BT=ids_BT,
            starts_B=self._slots.lengths[slots],
            adapters_B=self._slots.adapter[slots],
            slots=slots,
            sizes=sizes,
            copies=self._take_copies(),
            scores=self._scores(slots, sizes),
            draws=self._draws_of(slots[rows], rows, sizes[rows] - 1) if len(rows) else None,
        )

    def _decode(self, waiting: list[int]) -> ForwardPass:
        """One token for every request in `waiting`.

        Mostly these are all slots up to the last busy one, and computing the few between them as well
        is cheaper than gathering the KV of some; what that writes is behind those slots' own tokens.
        """
        active = np.asarray(waiting)
        rows = np.arange(self._slots.num_rows)
        is_dense = len(rows) <= 2 * len(active)
        if not is_dense or self._slots.lengths[rows].max() > self._slots.lengths[active].max():
            rows = active
        starts = self._slots.lengths[rows]
        last_column = self._slots.tokens.shape[1] - 1
        is_slice = len(rows) == rows[-1] + 1
        return ForwardPass(
            rows=slice(0, len(rows)) if is_slice else rows,
            ids_BT=self._slots.tokens[rows, np.minimum(starts, last_column)][:, None].astype(np.int64),
            starts_B=starts,
            adapters_B=self._slots.adapter[rows],
            slots=active,
            sizes=np.ones(len(active), np.int64),
            copies=self._take_copies(),
            scores=(),
            draws=self._draws_of(active, np.searchsorted(rows, active), np.zeros(len(active), np.int64)),
        )

    def _draws_behind(self, slot: int, size: int) -> bool:
        """Whether a slot's request has its first token drawn once `size` more tokens of its context are computed."""
        return self._num_pending(slot) == size and self.running[slot].params.max_new_tokens > 0

    def _draws_of(self, slots: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> Draws:
        requests = [self.running[slot] for slot in slots.tolist()]
        positions = np.asarray([request.num_context for request in requests])
        return Draws(slots, rows, columns, positions, [request.params for request in requests])

    def _append(self, slots: np.ndarray, drawn: Draw) -> None:
        """Give each slot's request its token, and end those that are done."""
        self._slots.append(slots, np.asarray(drawn.tokens, np.int32))
        for row, slot in enumerate(slots.tolist()):
            request = self.running[slot]
            kv_label = self._labels[self._slots.origin[slot]]
            request.append(drawn.tokens[row], drawn.logprobs[row], self._labels[-1], kv_label)
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

    def _scores(self, slots: np.ndarray, sizes: np.ndarray) -> list[PromptScores]:
        """The prompt tokens of this pass whose log-probabilities are asked for."""
        scores = []
        for row, (slot, size) in enumerate(zip(slots.tolist(), sizes.tolist(), strict=True)):
            request, start = self.running[slot], int(self._slots.lengths[slot])
            if request.score_from is not None:
                scores.append(PromptScores(slot, row, request.prompt_ids[start + 1 : start + size + 1]))
        return scores

    def _take_copies(self) -> list[PrefixCopy]:
        copies, self._copies = self._copies, []
        return copies

    def _num_pending(self, slot: int) -> int:
        return self.running[slot].num_context - int(self._slots.lengths[slot])
