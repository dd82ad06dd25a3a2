"""Credit: from an agent's reward, the rewards of its turns and scores of states to an advantage for each turn.

What every rule for turns must not do is pay the policy for a score. A term of turn k may be anything that is settled
before reply k is drawn (what stands in its context, and the group's other episodes): under the policy it then
multiplies grad log pi(reply) by a constant, whose mean is 0. It may not depend on reply k nor on what follows from it:

- raw scores as rewards, or raw differences s_k - s_(k-1), add the last score to what is optimised;
- a potential other than 0 at an ending (truncation is one) does the same;
- a division by the deviation of the group's rewards, in which the episode's own outcome is one, scales the terms by
  what followed from the reply, and groups that agree would have their scores blown up without a bound;
- advantages of turns that are accumulated over the turns that follow, each less a mean over the group, subtract as many
  means as the episode had turns, which the policy decides: a hidden price on every further turn (verl issue 7244);
- dropping groups by their outcome (``group_filter = "spread"``) leaves such terms in some groups whose mean is 0 over
  all of them only.

So the expected gradient of both rules below is that of the expected (discounted) reward, whatever the scores, under a
denominator that the episode does not decide (``aggregation = "constant"``; dividing by tokens, an episode's own or the
batch's, weighs all rules alike by length). An episode whose scores are not complete counts by its rewards alone. If
what the policy writes decides whether they are complete, that is a choice between two baselines, no longer settled
before the reply: such tokens are counted (``trainer/unscored_tokens``), and should be few.

The reward to go is taken in the order in which the agent's turns were played, whatever branch each is on: a later turn
on another branch may well follow from a reply. A reply that several branches share is one turn with one advantage,
which each copy of its tokens has.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True, eq=False)
class AgentTurns:
    """The K turns of one agent in one episode, as they were played.

    `outcome` is the agent's reward less those of its turns: it comes at the end. `potentials` are of the states that
    the replies were drawn from, NaN where the scorer says nothing; None without scores. Without any turn (an episode
    that is not trained) the whole reward is `outcome`.

    Example: a reward of 1.2, of which turn 1 of three made 0.2: ``AgentTurns(1.0, np.array([0, 0.2, 0]))``.
    """

    outcome: float
    rewards: np.ndarray  # [K] float64
    potentials: np.ndarray | None = None  # [K] float64

    def returns_to_go(self, gamma: float) -> np.ndarray:
        """[K]: sum over l >= k of gamma^(l-k) r_l, with the outcome in the last turn."""
        returns = np.append(self.rewards, 0.0)
        if len(self.rewards):
            returns[-2] += self.outcome
        for turn in reversed(range(len(self.rewards))):
            returns[turn] += gamma * returns[turn + 1]
        return returns[:-1]

    def whole_return(self, gamma: float) -> float:
        """The return from the start; undiscounted where no turn is known."""
        return float(self.returns_to_go(gamma)[0]) if len(self.rewards) else self.outcome

    def surplus(self, level: float) -> np.ndarray:
        """[K]: how much the state of each turn is worth more than that of the first; 0 where nobody says.

        `level` is the worth of the first state where the scorer does not say it.
        """
        if self.potentials is None or not len(self.rewards):
            return np.zeros(len(self.rewards))
        first = level if np.isnan(self.potentials[0]) else self.potentials[0]
        return np.nan_to_num(self.potentials - first, nan=0.0)


def shaping_advantages(units: Sequence[AgentTurns], members: Sequence[Hashable], gamma: float) -> list[np.ndarray]:
    """Potential-based shaping (Ng, Harada and Russell 1999, ICML, theorem 1) with a leave-one-out baseline.

    Rewards r_k become r_k + F_k with F_k = gamma Phi(s_(k+1)) - Phi(s_k), and Phi = 0 at every ending, truncation
    included. Each state has one potential in both terms, so the sum to go telescopes, and the shaped return is
    G_k - Phi(s_k): the scores act as a baseline of the state and nothing else, whatever they are. With b_i the mean of
    the other members' returns from the start::

        A_ik = gamma^k ((G_ik - b_i) - (Phi(s_ik) - Phi(s_i0)))

    It estimates the gradient of the expected return, discounted by gamma from the start. A reply before which the
    outcome was already decided gets about 0, a reply that turned it gets the difference that it made.

    Deviations: the baseline of the paper's shaped return is the mean of the others' G_j0 - Phi(s_j0); all members begin
    in one state, and taking its potential from the episode itself gives the same number where the scorer is a
    function, and needs no scores of the others. Where the scorer says nothing of the first state, b_i stands for
    it: then A_ik = G_ik - Phi(s_ik) behind the first turn. gamma^k is kept, which most implementations leave out:
    without it no objective has this gradient (Nota and Thomas 2020, arXiv 1906.07073). An episode alone in its group
    has advantage 0, as for all baselines of groups.

    Example: rewards 1 and 0, gamma 1; in the first the potentials are .5 and .9: its advantages are 1 and .6, those of
    the other, without scores, -1.

    Args:
        units: agents in episodes.
        members: what each is compared within; those of equal value are a group.
        gamma: discount of a turn.

    Returns:
        [K] float64 for each.
    """
    advantages = [np.zeros(len(unit.rewards)) for unit in units]
    for group in _groups(members):
        if len(group) > 1:
            for index, baseline in zip(group, _others_returns(units, group, gamma), strict=True):
                advantages[index] = _shaped(units[index], baseline, gamma)
    return advantages


def turn_advantages(units: Sequence[AgentTurns], members: Sequence[Hashable], gamma: float) -> list[np.ndarray]:
    """Reward to go of each turn against the others' at the same turn, leave one out (RLOO, arXiv 2402.14740, by turn).

    G'_ik = G_ik - Phi(s_ik), or G_ik without scores; b_ik is the mean of G'_jk over those *other* episodes that
    reached a turn k (and have a potential there, if ours does)::

        A_ik = gamma^k (G'_ik - b_ik)

    Where no other did, the baseline is that of `shaping_advantages`. It estimates the gradient of the expected
    return, as that does, with less variance where turns have rewards of their own.

    No hidden bonus: b_ik is one number, subtracted in turn k alone. It depends on k, which is settled before reply k,
    and on other episodes, which of them reached k included; never on reply k or on how long the episode itself went on.
    The biased construction (verl issue 7244; MT-GRPO's normalisation by turn, accumulated) gives reply k
    the sum over l >= k of r_l - mean_l: as many means as its own episode had turns behind k. Including the episode
    itself in the mean of turn k would be no bonus but would shrink its advantage by 1/n_k, most where few arrive.

    Args, returns: as `shaping_advantages`.
    """
    advantages = shaping_advantages(units, members, gamma)
    for group in _groups(members):
        raw_GK, shaped_GK = _return_tables([units[index] for index in group], gamma)
        for row, index in enumerate(group):
            num_turns = len(units[index].rewards)
            is_scored_K = ~np.isnan(shaped_GK[row, :num_turns])
            own_K = np.where(is_scored_K, shaped_GK[row, :num_turns], raw_GK[row, :num_turns])
            scored_K, unscored_K = (_others_mean(table, row)[:num_turns] for table in (shaped_GK, raw_GK))
            baseline_K = np.where(is_scored_K, scored_K, unscored_K)
            compared_K = gamma ** np.arange(num_turns) * (own_K - baseline_K)
            advantages[index] = np.where(np.isnan(baseline_K), advantages[index], compared_K)
    return advantages


def teacher_advantages(
    advantages_S: torch.Tensor, logprobs_S: torch.Tensor, teacher_S: torch.Tensor, weight: float
) -> torch.Tensor:
    """A + weight (log pi_T - log pi), detached; A alone where the teacher's is NaN (on-policy distillation).

    Under pi the mean of grad log pi (log pi_T - log pi) at a token is -grad KL(pi || pi_T) there: each token descends
    the reverse KL of its own distribution, with the contexts as they come (arXiv 2306.13649 with lambda 1 and the
    reverse KL; prime-rl ``ref_kl``, slime ``opd``). How a token changes which contexts come later is left out, as
    there: the gradient is the sum of the KLs of single tokens, at fixed contexts, which all vanish at pi = pi_T. With a
    reference policy as teacher it is a KL penalty of that kind, under which the outcome's optimum moves towards the
    reference.

    pi is the policy of the present pass, not of the batch's start, so that later optimizer steps on a batch do not
    overshoot. No trust region of its own (prime-rl drops tokens whose probability fell by more than .2, whatever the
    sign): the sum of both terms is under the bound of the loss, which goes by the direction of the advantage.
    """
    gap_S = torch.nan_to_num(teacher_S - logprobs_S.detach(), nan=0.0)
    return advantages_S + weight * gap_S


def _groups(members: Sequence[Hashable]) -> Iterator[list[int]]:
    """Indices of each group's members."""
    found: dict[Hashable, list[int]] = {}
    for index, member in enumerate(members):
        found.setdefault(member, []).append(index)
    yield from found.values()


def _others_returns(units: Sequence[AgentTurns], group: Sequence[int], gamma: float) -> list[float]:
    """Mean return from the start of the others, for each of at least two members."""
    returns = np.array([units[index].whole_return(gamma) for index in group])
    return [float(np.delete(returns, row).mean()) for row in range(len(group))]


def _shaped(unit: AgentTurns, baseline: float, gamma: float) -> np.ndarray:
    discounts = gamma ** np.arange(len(unit.rewards))
    shaped: np.ndarray = discounts * (unit.returns_to_go(gamma) - baseline - unit.surplus(baseline))
    return shaped


def _return_tables(units: Sequence[AgentTurns], gamma: float) -> tuple[np.ndarray, np.ndarray]:
    """[G, K] each: rewards to go, and those less the potentials; NaN where there is no turn, or no potential."""
    longest = max(len(unit.rewards) for unit in units)
    raw_GK = np.full((len(units), longest), np.nan)
    shaped_GK = raw_GK.copy()
    for row, unit in enumerate(units):
        count = len(unit.rewards)
        raw_GK[row, :count] = unit.returns_to_go(gamma)
        if unit.potentials is not None:
            shaped_GK[row, :count] = raw_GK[row, :count] - unit.potentials
    return raw_GK, shaped_GK


def _others_mean(table_GK: np.ndarray, row: int) -> np.ndarray:
    """[K]: mean of the other rows where they have something; NaN where none does."""
    others = np.delete(table_GK, row, axis=0)
    counts = (~np.isnan(others)).sum(axis=0)
    means: np.ndarray = np.where(counts > 0, np.nansum(others, axis=0) / np.maximum(counts, 1), np.nan)
    return means
