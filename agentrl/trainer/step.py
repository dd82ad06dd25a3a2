"""The step over one batch: the alarm, and optimizer steps that are each made of micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.algorithms.outcome import TokenOutcome, token_outcome
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.explanation import LossTrace
from agentrl.trainer.logprob_mismatch import FreshGaps, FreshReport
from agentrl.trainer.minibatches import Minibatch
from agentrl.trainer.model import PolicyModel, reshard_policy
from agentrl.trainer.optimizer import OptimizerSet
from agentrl.trainer.packing import MicroBatch, deal, pack
from agentrl.trainer.sequence import TokenSequence, replayed_fraction
from agentrl.types.errors import TrainerError

_SUMS = (
    "loss", "tokens", "clipped", "rejected", "weight", "weight_squared", "k3", "credit", "teacher_tokens", "teacher_gap"
)  # fmt: skip


@dataclass(slots=True)
class StepSums:
    """Sums over this rank's tokens that become the step's metrics once ranks are added up."""

    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMS, 0.0))

    def add(self, loss: torch.Tensor, outcome: TokenOutcome, mismatched_S: torch.Tensor) -> None:
        """Add a micro-batch's loss, and what became of its tokens but for those that are masked."""
        learned_S = ~mismatched_S
        gap_S, weights_S = outcome.gap_S[learned_S], outcome.weights_S[learned_S]
        values = {
            "loss": loss.detach(),
            "tokens": learned_S,
            "clipped": outcome.losses.clipped_S[learned_S],
            "rejected": weights_S == 0,
            "weight": weights_S,
            "weight_squared": weights_S.square(),
            "k3": gap_S.exp() - 1 - gap_S,
            "credit": outcome.advantages_S[learned_S].abs(),
        }
        if outcome.teacher_gap_S is not None:
            known_S = learned_S & ~outcome.teacher_gap_S.isnan()
            values |= {"teacher_tokens": known_S, "teacher_gap": outcome.teacher_gap_S[known_S]}
        for name, value in values.items():
            self.sums[name] += float(value.sum())

    def reduced(self, device: str) -> dict[str, float]:
        """Sums over all ranks. All ranks must call."""
        totals = torch.tensor([self.sums[name] for name in _SUMS], dtype=torch.float64, device=device)
        dist.all_reduce(totals)
        return dict(zip(_SUMS, totals.tolist(), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class StartingPoint:
    """What the weights before the first of several optimizer steps say of the batch's sequences."""

    logprobs: tuple[torch.Tensor, ...]  # [S] of each sequence: log pi_prox, nats
    mismatched: frozenset[int]  # indices of the sequences that are masked
    report: FreshReport


@dataclass(frozen=True, slots=True, eq=False)
class StepRun:
    """All that the passes over one batch have in common. Every rank does the same passes over its own share."""

    policy: PolicyModel
    algorithm: AlgorithmConfig
    config: TrainerConfig
    temperature: float
    trace: LossTrace | None
    is_gate: bool
    is_redo: bool
    lr_scale: float
    sums: StepSums = field(default_factory=StepSums)

    @torch.no_grad()
    def start(self, sequences: Sequence[TokenSequence]) -> StartingPoint:
        """One forward pass over everything; all ranks get the same answer."""
        gaps = FreshGaps(self.config.max_gap_nats, self.config.device)
        counts = [len(sequence.selected) for sequence in sequences]
        # Every rank fills in its own share; a sum over ranks puts the shares together.
        whole = torch.zeros(sum(counts), device=self.config.device)
        mismatched_N = torch.zeros(len(sequences), device=self.config.device)
        logprobs = whole.split(counts)
        for part, batch in self._micro_batches(Minibatch.of_all(sequences)):
            logprobs_S = self.policy(batch, self.temperature)
            outcome = self._outcome(logprobs_S, batch, None)
            mismatched_S = gaps.add(outcome.gap_S, batch)
            if self.trace is not None:
                self.trace.add(part, logprobs_S, outcome, mismatched_S)
            for place, index in enumerate(part.indices):
                is_own_S = batch.sequences_S == place
                logprobs[index].copy_(logprobs_S[is_own_S])
                mismatched_N[index] = mismatched_S[is_own_S].any()
        reshard_policy(self.policy)
        dist.all_reduce(whole)
        dist.all_reduce(mismatched_N)
        masked = frozenset(mismatched_N.nonzero()[:, 0].tolist())
        return StartingPoint(logprobs, masked, gaps.reduced())

    def backward(self, minibatch: Minibatch, start: StartingPoint | None) -> FreshGaps:
        """Gradients of one minibatch.

        Without a starting point it is the batch's only one: the weights are those before the step, fresh tokens are
        compared (what is found comes back), and sequences that mismatch are masked here. A sequence lies within one
        micro-batch, so that no other pass is needed to find them.
        """
        gaps = FreshGaps(self.config.max_gap_nats, self.config.device)
        for part, batch in self._micro_batches(minibatch):
            logprobs_S = self.policy(batch, self.temperature)
            proximal_S = None if start is None else _joined(start.logprobs, part.indices, logprobs_S)
            outcome = self._outcome(logprobs_S, batch, proximal_S)
            nothing_S = torch.zeros_like(logprobs_S, dtype=torch.bool)
            mismatched_S = gaps.add(outcome.gap_S, batch) if start is None else nothing_S
            if self.trace is not None:
                self.trace.add(part, logprobs_S, outcome, mismatched_S)
            terms_S = outcome.weights_S * outcome.losses.loss_S * batch.scales_S
            loss = terms_S.masked_fill(mismatched_S, 0.0).sum()
            self.sums.add(loss, outcome, mismatched_S)
            # A rank without tokens must take part in the backward pass as well.
            ((loss + 0.0 * logprobs_S.sum()) * dist.get_world_size()).backward()
        return gaps

    def check(self, report: FreshReport) -> None:
        """Raise TrainerError if trainer and engine disagree too much to go on."""
        if not self.is_redo:
            report.check(self.config, self.is_gate)

    def _micro_batches(self, minibatch: Minibatch) -> Iterator[tuple[Minibatch, MicroBatch]]:
        """Micro-batches of a minibatch for this rank; as many as every other rank has."""
        lengths = [len(sequence.token_ids) for sequence in minibatch.sequences]
        shares = deal(lengths, dist.get_world_size(), self.config.micro_batch_tokens)
        for share in shares[dist.get_rank()]:
            sequences = tuple(minibatch.sequences[i] for i in share)
            yield Minibatch(tuple(minibatch.indices[i] for i in share), sequences), pack(sequences, self.config.device)

    def _outcome(self, logprobs_S: torch.Tensor, batch: MicroBatch, proximal_S: torch.Tensor | None) -> TokenOutcome:
        columns = batch.behaviour_S, batch.advantages_S, batch.turns_S, batch.sequences_S
        return token_outcome(logprobs_S, *columns, self.algorithm, proximal_S, batch.teacher_S)


def run_step(
    policy: PolicyModel,
    optimizer: OptimizerSet,
    sequences: Sequence[TokenSequence],
    algorithm: AlgorithmConfig,
    config: TrainerConfig,
    temperature: float,
    is_gate: bool,
    trace: LossTrace | None = None,
    minibatches: Sequence[Minibatch] = (),
    is_redo: bool = False,
    lr_scale: float = 1.0,
) -> dict[str, float]:
    """Learn from one batch; every rank calls it with the same sequences.

    Fresh tokens are compared with the engine before any weight changes. A gate step, the first that has some, allows
    no sequence beyond the limit; later ones mask such sequences unless they are too many. Each minibatch with
    something to learn then makes one optimizer step. A trace is told of every token.

    Args:
        policy: the model.
        optimizer: of its parameters.
        sequences: all that the batch selected.
        algorithm: the loss.
        config: of the trainer.
        temperature: that tokens were drawn with.
        is_gate: as above.
        trace: hears of every pass over every sequence.
        minibatches: of the sequences, in order; none for one optimizer step over all.
        is_redo: the step is on record: mask what mismatches, as the first time, and end the run for none of it.
        lr_scale: what the configured learning rates are multiplied with.

    Returns:
        Metrics named ``trainer/quantity_unit``, equal on all ranks. Loss and norm are means over the optimizer
        steps; tokens and their fractions count a token in every epoch; gaps are of the weights before the step.

    Raises:
        TrainerError: trainer and engine disagree, or the gradient is not finite.
    """
    run = StepRun(policy, algorithm, config, temperature, trace, is_gate, is_redo, lr_scale)
    if len(minibatches) > 1:
        report, norms = _several_steps(run, optimizer, sequences, minibatches)
    else:
        report, norms = _one_step(run, optimizer, sequences)
    totals = run.sums.reduced(config.device)
    return {
        **_metrics(totals, norms),
        **report.metrics(),
        "trainer/learning_rate": config.optimizer.learning_rate * lr_scale,
        "trainer/skipped_minibatches": float(max(len(minibatches), 1) - len(norms)),
        "trainer/replayed_fraction": replayed_fraction(sequences),
    }


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


def _one_step(
    run: StepRun, optimizer: OptimizerSet, sequences: Sequence[TokenSequence]
) -> tuple[FreshReport, list[float]]:
    """The report and the norms of the gradients: one, or none where everything is masked."""
    report = run.backward(Minibatch.of_all(sequences), None).reduced()
    run.check(report)
    if report.mismatched_sequences == len(sequences):
        optimizer.clear()  # momentum and decay must not move the weights either
        return report, []
    return report, [_update(run, optimizer, 0)]


def _several_steps(
    run: StepRun,
    optimizer: OptimizerSet,
    sequences: Sequence[TokenSequence],
    minibatches: Sequence[Minibatch],
) -> tuple[FreshReport, list[float]]:
    """The report and the norms of the gradients, one for each minibatch that is not empty."""
    start = run.start(sequences)
    run.check(start.report)
    norms: list[float] = []
    for part in (minibatch.without(start.mismatched) for minibatch in minibatches):
        if part.indices:
            run.backward(part, start)
            norms.append(_update(run, optimizer, len(norms)))
    return start.report, norms


def _update(run: StepRun, optimizer: OptimizerSet, num_before: int) -> float:
    """One optimizer step, behind others of the same batch; returns the norm of its gradient."""
    norm = _clip(run.policy, run.config.optimizer.max_grad_norm)
    if math.isfinite(norm):
        optimizer.step(run.lr_scale)
        return norm
    weights = "the weights are unchanged"
    if num_before:
        weights = (
            f"{num_before} optimizer steps on this batch have changed the weights, which are given up with this "
            "process; a resumed run does the batch again from the weights before it"
        )
    raise TrainerError(f"the gradient norm is {norm}; {weights}. Lower the learning rate, or look for bad rewards")


def _joined(columns: Sequence[torch.Tensor], indices: Sequence[int], like_S: torch.Tensor) -> torch.Tensor:
    """The columns of some sequences behind one another; of none, an empty one."""
    return torch.cat([columns[index] for index in indices]) if indices else like_S.detach()


def _clip(policy: PolicyModel, max_norm: float) -> float:
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _metrics(totals: dict[str, float], norms: Sequence[float]) -> dict[str, float]:
    tokens, num_steps, taught = max(totals["tokens"], 1.0), max(len(norms), 1), totals["teacher_tokens"]
    teacher = {"trainer/teacher_kl_nats": totals["teacher_gap"] / taught} if taught else {}
    return {
        **teacher,
        "trainer/loss": totals["loss"] / num_steps,
        "trainer/grad_norm": sum(norms) / num_steps,
        "trainer/optimizer_steps": float(len(norms)),
        "trainer/computed_tokens": totals["tokens"],
        "trainer/clipped_fraction": totals["clipped"] / tokens,
        "trainer/rejected_fraction": totals["rejected"] / tokens,
        "trainer/effective_fraction": totals["weight"] ** 2 / (tokens * max(totals["weight_squared"], 1e-12)),
        "trainer/kl_k3_nats": totals["k3"] / tokens,
        "trainer/advantage_abs_mean": totals["credit"] / tokens,
    }
