"""Forward passes: what one computes, and whether it runs on the event loop or in a thread."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from agentrl.engine.model import ServedModel
from agentrl.engine.request import DrawParams
from agentrl.engine.sampler import Draw, draw
from agentrl.process.threads import OwnThread


@dataclass(frozen=True, slots=True)
class PrefixCopy:
    """The KV of the first tokens in slot `source` goes to slot `target`, which holds the same tokens."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Score `targets`, the tokens behind each of the first tokens of row `row`, for slot `slot`."""

    slot: int
    row: int
    targets: list[int]


@dataclass(frozen=True, slots=True)
class Draws:
    """Draw a token for each of the slots [N].

    `rows` [N] and `columns` [N] say where in the pass the last token of each stands, `positions` [N] how long its
    context is, the counter of its random number.
    """

    slots: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    positions: np.ndarray
    params: Sequence[DrawParams]


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One forward pass and what is wanted of it; nothing in it changes while it is computed.

    `rows` are the slots of ids_BT, which begin at columns starts_B, by adapters_B. Rows of a pass may belong to slots
    for which nothing is computed: `slots` [S] are those that hold `sizes` [S] more tokens behind it.

    Example: a prefill of three and two tokens of slots 0 and 4 has ids_BT ``[[5, 6, 7], [8, 9, 0]]``, slots ``[0, 4]``
    and sizes ``[3, 2]``, and draws from columns ``[2, 1]`` if both prompts end with it.
    """

    rows: slice | np.ndarray
    ids_BT: np.ndarray
    starts_B: np.ndarray
    adapters_B: np.ndarray
    slots: np.ndarray
    sizes: np.ndarray
    copies: Sequence[PrefixCopy]
    scores: Sequence[PromptScores]
    draws: Draws | None

    @property
    def is_prefill(self) -> bool:
        """Whether it takes several tokens of a context; passes that are alike in this, and in size, take alike long."""
        return bool(self.ids_BT.shape[1] > 1)


@dataclass(frozen=True, slots=True)
class Computed:
    """What came of a pass: the log-probabilities for each of its `scores`, and the tokens of its `draws`."""

    logprobs: Sequence[list[float]]
    drawn: Draw | None


def compute(model: ServedModel, wanted: ForwardPass, rounds: bool) -> Computed:
    """Compute a pass, reading and writing nothing but the model and its KV; log-probabilities to a grid if `rounds`."""
    for copy in wanted.copies:
        model.copy_prefix(copy.source, copy.target, copy.num_tokens)
    hidden_BTH = model.forward(wanted.rows, wanted.ids_BT, wanted.starts_B, wanted.adapters_B)
    logprobs = []
    for score in wanted.scores:
        logprobs_TV = model.logits(hidden_BTH[score.row, : len(score.targets)]).log_softmax(-1)
        targets_T1 = torch.tensor(score.targets, dtype=torch.int64, device=logprobs_TV.device)[:, None]
        logprobs.append(logprobs_TV.gather(1, targets_T1)[:, 0].tolist())
    draws = wanted.draws
    if draws is None:
        return Computed(logprobs, None)
    logits_NV = model.logits(hidden_BTH[draws.rows, draws.columns])
    return Computed(logprobs, draw(logits_NV, draws.params, draws.positions, rounds))


class PassRunner:
    """Computes one pass after the other, on the event loop or in a thread of its own.

    A pass in a thread lets the event loop answer calls. Long passes run there, since a client that gets no answer may
    take the engine for dead, and all passes do inside `loop_needed`. Short ones do not: threads that share the
    interpreter cost a pass 0.2 to 1 ms, and a call 0.8 ms instead of 0.3.
    """

    def __init__(self, model: ServedModel, rounds: bool, long_s: float) -> None:
        """Round log-probabilities if `rounds`; a pass is long from `long_s` seconds on."""
        self._model, self._rounds = model, rounds
        self._thread = OwnThread("engine-step")
        self._long_s = long_s
        self._longest: dict[bool, tuple[float, int]] = {}
        self._num_needing = 0
        self._began: float | None = None

    @property
    def computing_s(self) -> float:
        """For how long the pass under way has been computed; 0 between two."""
        return 0.0 if self._began is None else time.perf_counter() - self._began

    @contextmanager
    def loop_needed(self) -> Iterator[None]:
        """Compute every pass in the thread inside the block."""
        self._num_needing += 1
        try:
            yield
        finally:
            self._num_needing -= 1

    async def run(self, wanted: ForwardPass) -> Computed:
        """What comes of a pass. Waits for: its end."""
        self._began = time.perf_counter()
        try:
            if self._is_short(wanted) and not self._num_needing:
                return self._compute(wanted)
            return await self._thread.call(lambda: self._compute(wanted))
        finally:
            self._began = None

    def _is_short(self, wanted: ForwardPass) -> bool:
        """Whether the longest recent pass of its kind, scaled up to this one's size, is below the limit."""
        if wanted.is_prefill not in self._longest:
            return False
        longest_s, num_ids = self._longest[wanted.is_prefill]
        return longest_s * max(1.0, wanted.ids_BT.size / num_ids) < self._long_s

    def _compute(self, wanted: ForwardPass) -> Computed:
        started = time.perf_counter()
        computed = compute(self._model, wanted, self._rounds)
        took_s = time.perf_counter() - started
        longest_s, num_ids = self._longest.get(wanted.is_prefill, (0.0, 1))
        fades_s = 0.95 * longest_s
        self._longest[wanted.is_prefill] = (took_s, wanted.ids_BT.size) if took_s >= fades_s else (fades_s, num_ids)
        return computed
