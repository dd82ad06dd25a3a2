"""One optimizer step over a batch: forward and backward of each micro-batch, the gate, the update."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.algorithms.outcome import TokenOutcome, token_outcome
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.explanation import LossTrace
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.optimizer import OptimizerSet
from agentrl.trainer.packing import MicroBatch, deal, pack
from agentrl.trainer.sequence import TokenSequence, replayed_fraction
from agentrl.types.errors import TrainerError

_SUMS = ("loss", "tokens", "clipped", "rejected", "weight", "weight_squared", "k3", "abs_gap", "fresh")


@dataclass(slots=True)
class StepSums:
    """Sums over this rank's tokens that become the step's metrics once ranks are added up."""

    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMS, 0.0))
    max_fresh_gap: float = 0.0

    def add(self, **values: torch.Tensor) -> None:
        """Add tensors' sums by name."""
        for name, value in values.items():
            self.sums[name] += float(value.sum())

    def reduced(self, device: str) -> dict[str, float]:
        """Sums and maximum over all ranks. All ranks must call."""
        totals = torch.tensor([self.sums[name] for name in _SUMS], dtype=torch.float64, device=device)
        most = torch.tensor([self.max_fresh_gap], dtype=torch.float64, device=device)
        dist.all_reduce(totals)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return {**dict(zip(_SUMS, totals.tolist(), strict=True)), "max_fresh_gap": float(most)}


def run_step(
    policy: PolicyModel,
    optimizer: OptimizerSet,
    sequences: list[TokenSequence],
    algorithm: AlgorithmConfig,
    config: TrainerConfig,
    temperature: float,
    is_gate: bool,
    trace: LossTrace | None = None,
) -> dict[str, float]:
    """Update the policy once; every rank calls it with the same sequences.

    A gate step, the first with tokens that these very weights sampled, compares trainer and engine before it
    changes anything. A trace is told of every token.

    Returns:
        Metrics named ``trainer/quantity_unit``, equal on all ranks.

    Raises:
        TrainerError: the gate failed, or the gradient is not finite.
    """
    shares = deal([len(s.token_ids) for s in sequences], dist.get_world_size(), config.micro_batch_tokens)
    sums = StepSums()
    for indices in shares[dist.get_rank()]:
        batch = pack([sequences[i] for i in indices], config.device)
        logprobs_S = policy(batch, temperature)
        outcome = token_outcome(
            logprobs_S, batch.behaviour_S, batch.advantages_S, batch.turns_S, batch.sequences_S, algorithm
        )
        if trace is not None:
            trace.add(indices, sequences, logprobs_S, outcome)
        loss = _batch_loss(logprobs_S, outcome, batch, sums)
        (loss * dist.get_world_size()).backward()
    totals = sums.reduced(config.device)
    if is_gate and totals["max_fresh_gap"] > config.max_gap_nats:
        raise TrainerError(_gate_message(totals, config))
    norm = _clip(policy, config.optimizer.max_grad_norm)
    if not torch.isfinite(torch.tensor(norm)):
        raise TrainerError(
            f"the gradient norm is {norm}; the weights are unchanged. Lower the learning rate, or look for bad rewards"
        )
    optimizer.step(1.0)
    return {**_metrics(totals, norm), "trainer/replayed_fraction": replayed_fraction(sequences)}


def run_supervised(
    policy: PolicyModel,
    optimizer: OptimizerSet | None,
    sequences: list[TokenSequence],
    config: TrainerConfig,
    lr_scale: float,
) -> float:
    """Negative log-likelihood in nats over all selected tokens; updates the policy if given an optimizer.

    The gradient is of the mean over tokens.
    """
    shares = deal([len(s.token_ids) for s in sequences], dist.get_world_size(), config.micro_batch_tokens)
    num_targets = sum(len(s.selected) for s in sequences)
    total = torch.zeros(1, dtype=torch.float64, device=config.device)
    for indices in shares[dist.get_rank()]:
        batch = pack([sequences[i] for i in indices], config.device)
        with torch.set_grad_enabled(optimizer is not None):
            nll = -policy(batch, 1.0).sum()
        if optimizer is not None:
            (nll * (dist.get_world_size() / num_targets)).backward()
        total += nll.detach().double()
    dist.all_reduce(total)
    if optimizer is not None:
        _clip(policy, config.optimizer.max_grad_norm)
        optimizer.step(lr_scale)
    return float(total)


def _batch_loss(logprobs_S: torch.Tensor, outcome: TokenOutcome, batch: MicroBatch, sums: StepSums) -> torch.Tensor:
    """Scaled loss of a micro-batch; adds to the sums."""
    gap_S, weights_S, losses = outcome.gap_S, outcome.weights_S, outcome.losses
    loss = (weights_S * losses.loss_S * batch.scales_S).sum()
    fresh_S = batch.staleness_S == 0
    sums.add(
        loss=loss.detach(),
        tokens=torch.ones_like(gap_S),
        clipped=losses.clipped_S.float(),
        rejected=(weights_S == 0).float(),
        weight=weights_S,
        weight_squared=weights_S.square(),
        k3=gap_S.exp() - 1 - gap_S,
        abs_gap=gap_S.abs() * fresh_S,
        fresh=fresh_S.float(),
    )
    if fresh_S.any():
        sums.max_fresh_gap = max(sums.max_fresh_gap, float(gap_S[fresh_S].abs().max()))
    return loss + 0.0 * logprobs_S.sum()


def _clip(policy: PolicyModel, max_norm: float) -> float:
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _metrics(totals: dict[str, float], norm: float) -> dict[str, float]:
    tokens = max(totals["tokens"], 1.0)
    return {
        "trainer/loss": totals["loss"],
        "trainer/grad_norm": norm,
        "trainer/computed_tokens": totals["tokens"],
        "trainer/clipped_fraction": totals["clipped"] / tokens,
        "trainer/rejected_fraction": totals["rejected"] / tokens,
        "trainer/effective_fraction": totals["weight"] ** 2 / (tokens * max(totals["weight_squared"], 1e-12)),
        "trainer/kl_k3_nats": totals["k3"] / tokens,
        "trainer/fresh_tokens": totals["fresh"],
        "trainer/fresh_gap_mean_nats": totals["abs_gap"] / max(totals["fresh"], 1.0),
        "trainer/fresh_gap_max_nats": totals["max_fresh_gap"],
    }


def _gate_message(totals: dict[str, float], config: TrainerConfig) -> str:
    return (
        f"first-step gate: trainer and engine disagree by {totals['max_fresh_gap']:.2e} nats on tokens of the same "
        f"weights (bound trainer.max_gap_nats = {config.max_gap_nats:g}). Training on this would be training on noise. "
        "Check that both load the same model, the sampling temperature and truncation, the dtypes, and the chat format"
    )
