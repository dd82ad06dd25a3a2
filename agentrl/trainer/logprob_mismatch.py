"""How far fresh tokens lie from the engine's log-probabilities: the alarm of every step, and a report.

Fresh tokens were drawn by the very weights that a step begins with, so that engine and trainer must agree on them up
to rounding. Where they do not, the tokens are not the policy's: answers of another request, an engine that serves
other weights than it says, or a model that the two understand differently.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.packing import MicroBatch, deal, pack
from agentrl.trainer.sequence import TokenSequence
from agentrl.types.errors import TrainerError

# More than this share of the sequences with fresh tokens is the fault of an engine. One sequence alone may be an
# outlier of rounding or the fault of one answer, however few there are beside it.
_MAX_MISMATCHED_FRACTION = 0.5
_MIN_SYSTEMIC_SEQUENCES = 2


@dataclass(frozen=True, slots=True)
class FreshReport:
    """Fresh tokens of a step, over all ranks.

    `sequences` have fresh tokens. `mismatched_sequences` have one beyond the limit, and `mismatched_tokens` are all
    tokens of those in the loss, fresh or not.
    """

    tokens: int
    sequences: int
    mismatched_sequences: int
    mismatched_tokens: int
    mean_nats: float
    max_nats: float

    def check(self, config: TrainerConfig, is_gate: bool) -> None:
        """Raise TrainerError if masking is not enough: at the gate of any mismatch, later of too many."""
        count = self.mismatched_sequences
        if is_gate and count:
            raise TrainerError(f"first-step gate: {self._found(config)}. {_GATE_REMEDY}")
        if count >= _MIN_SYSTEMIC_SEQUENCES and count > _MAX_MISMATCHED_FRACTION * self.sequences:
            raise TrainerError(f"{self._found(config)}: too many to go on without them. {_SYSTEMIC_REMEDY}")

    def metrics(self) -> dict[str, float]:
        """By name."""
        return {
            "trainer/fresh_tokens": float(self.tokens),
            "trainer/fresh_sequences": float(self.sequences),
            "trainer/fresh_gap_mean_nats": self.mean_nats,
            "trainer/fresh_gap_max_nats": self.max_nats,
            "trainer/mismatched_sequences": float(self.mismatched_sequences),
            "trainer/mismatched_tokens": float(self.mismatched_tokens),
        }

    def _found(self, config: TrainerConfig) -> str:
        return (
            f"trainer and engine disagree by {self.max_nats:.2e} nats on tokens of the same weights "
            f"(bound trainer.max_gap_nats = {config.max_gap_nats:g}), in {self.mismatched_sequences} of "
            f"{self.sequences} sequences"
        )


_GATE_REMEDY = (
    "Training on this would be training on noise; no weight was changed. Check that both load the same model, the "
    "sampling temperature and truncation, the dtypes, and the chat format"
)
_SYSTEMIC_REMEDY = (
    "These tokens are not this policy's; no weight was changed. An engine serves other weights than it says, or "
    "answers reach the wrong requests: look at the engines' logs and at any proxy before them. If both only round "
    "differently, raise trainer.max_gap_nats. A resumed run masks these sequences and stops at the next that mismatch"
)


class FreshGaps:
    """Sums over this rank's sequences, micro-batch by micro-batch, that become the report once ranks are added up."""

    def __init__(self, max_gap_nats: float, device: str) -> None:
        self._limit = max_gap_nats
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)
        self._most = torch.zeros(1, dtype=torch.float64, device=device)

    def add(self, gap_S: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Note a micro-batch's log pi - log mu, pi being the weights before the step.

        Returns:
            mismatched_S: True for every token of a sequence that has a fresh token beyond the limit.
        """
        if not len(gap_S):
            return torch.zeros_like(gap_S, dtype=torch.bool)
        fresh_S = batch.staleness_S == 0
        # Not a number is no agreement either.
        distance_S = torch.where(gap_S.isnan(), torch.inf, gap_S.abs().double()).masked_fill(~fresh_S, 0.0)
        num_sequences = int(batch.sequences_S[-1]) + 1
        fresh_N = _any_of(fresh_S, batch.sequences_S, num_sequences)
        mismatched_N = _any_of(distance_S > self._limit, batch.sequences_S, num_sequences)
        mismatched_S = mismatched_N[batch.sequences_S]
        counts = (fresh_S.sum(), distance_S.sum(), fresh_N.sum(), mismatched_N.sum(), mismatched_S.sum())
        self._sums += torch.stack([count.double() for count in counts])
        self._most = torch.maximum(self._most, distance_S.max())
        return mismatched_S

    def reduced(self) -> FreshReport:
        """The report of all ranks. All ranks must call."""
        dist.all_reduce(self._sums)
        dist.all_reduce(self._most, dist.ReduceOp.MAX)
        tokens, distance, sequences, mismatched_sequences, mismatched_tokens = self._sums.tolist()
        return FreshReport(
            int(tokens),
            int(sequences),
            int(mismatched_sequences),
            int(mismatched_tokens),
            mean_nats=distance / max(tokens, 1.0),
            max_nats=float(self._most),
        )


def no_replay_gap(
    policy: PolicyModel, sequences: list[TokenSequence], config: TrainerConfig, temperature: float
) -> dict[str, float]:
    """The gap of fresh tokens when the live routers choose and nothing is cut from the distribution.

    Put beside ``trainer/fresh_gap_mean_nats`` of the same step it says what routing replay and kept sets are
    worth. One forward pass over the sequences that have fresh tokens; every rank calls it with the same.

    Returns:
        ``trainer/fresh_gap_mean_no_replay_nats`` and ``..._max_...``, equal on all ranks; empty without fresh
        tokens.
    """
    fresh = [s for s in sequences if (s.staleness == 0).any()]
    if not fresh:
        return {}
    shares = deal([len(s.token_ids) for s in fresh], dist.get_world_size(), config.micro_batch_tokens)
    sums = torch.zeros(2, dtype=torch.float64, device=config.device)
    most = torch.zeros(1, dtype=torch.float64, device=config.device)
    for indices in shares[dist.get_rank()]:
        batch = pack([fresh[i] for i in indices], config.device).without_replay()
        with torch.no_grad():
            gap_S = (policy(batch, temperature) - batch.behaviour_S).abs().double()
        gap_F = gap_S[batch.staleness_S == 0]
        sums += torch.stack([gap_F.sum(), gap_F.new_tensor(len(gap_F))])
        most = torch.maximum(most, gap_F.max() if len(gap_F) else most)
    dist.all_reduce(sums)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return {
        "trainer/fresh_gap_mean_no_replay_nats": float(sums[0] / sums[1]),
        "trainer/fresh_gap_max_no_replay_nats": float(most),
    }


def _any_of(is_so_S: torch.Tensor, sequences_S: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Whether any token of each sequence is so."""
    found_N = torch.zeros(num_sequences, dtype=torch.bool, device=is_so_S.device)
    found_N[sequences_S[is_so_S]] = True
    return found_N
