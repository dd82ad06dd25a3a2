"""What the buffer hands to a trainer, and what a trainer answers.

Dimension suffixes, used for tensors everywhere: T tokens packed one behind the other, S selected
(trained) tokens, H hidden size, V vocabulary, E episodes, G episodes of one group, N sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from agentrl.types.trajectory import Trajectory
from agentrl.types.version import PolicyVersion


@dataclass(frozen=True, slots=True)
class CreditColumns:
    """What the credit of a policy wants to know of each turn.

    `potentials` names the scorer of turns whose values of states it uses, `teacher` the one whose log-probabilities;
    each is empty for none. `turn_rewards` asks for the rewards of single turns.
    """

    potentials: str = ""
    teacher: str = ""
    turn_rewards: bool = False

    @property
    def scorer(self) -> str:
        """The scorer of turns that it names; empty for none."""
        return self.potentials or self.teacher


NO_COLUMNS = CreditColumns()


@dataclass(frozen=True, slots=True, eq=False)
class TrainTrajectory:
    """A trajectory and which of its tokens enter the loss.

    `loss_mask` is False where the token was not sampled, belongs to another policy, is pinned in a fork, or is staler
    than the bound; `staleness` is in steps, 0 where not sampled and where pinned. `fresh` is True where exactly the
    weights that the batch trains drew a token and wrote the KV cache that it was drawn from, so that engine and trainer
    must agree on it; None where staleness 0 says as much.

    What scorers of turns said stands at the tokens of each turn's reply and is 0 elsewhere; it is None where the credit
    of the policy asks for none, and where the episode's scores are not complete: there the outcome alone counts.
    `potentials` has the worth of the state that the reply was drawn from, NaN for one of which the scorer says nothing
    (the opening, as a rule), `turn_rewards` the turn's own part of the reward, `teacher_logprobs` another policy's
    log-probability of the token, in nats at temperature 1.
    """

    trajectory: Trajectory
    loss_mask: np.ndarray  # [L] bool
    staleness: np.ndarray  # [L] int32
    fresh: np.ndarray | None = None  # [L] bool
    potentials: np.ndarray | None = None  # [L] float32
    turn_rewards: np.ndarray | None = None  # [L] float32
    teacher_logprobs: np.ndarray | None = None  # [L] float32


@dataclass(frozen=True, slots=True, eq=False)
class TrainEpisode:
    """One episode of a batch: its rewards enter its group's baselines whether or not it is trained.

    `trajectories` is empty for an episode that is withheld (counted in the group, not trained). `agent_rewards` has
    the reward of each agent that acts by the batch's policy, each of which has a baseline of its own in the group;
    empty where one agent acts, whose reward is `reward`. `environment` is the one that it was played in. `fork` names
    the state that the episode and others of its group went on from; such episodes are compared with each other alone,
    and of their tokens only those behind that state are trained. Empty for one that was played from its start.
    `pinned_tokens` are sampled tokens before that state, those on several branches counted on each.
    """

    episode_id: str
    group: int
    reward: float
    trajectories: tuple[TrainTrajectory, ...]
    agent_rewards: dict[str, float] = field(default_factory=dict)
    environment: str = ""
    fork: str = ""
    pinned_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TrainBatch:
    """Complete groups for one step that turns `version` into the next.

    Example: 8 groups of 8 episodes are 64 `TrainEpisode`; `group` counts 0 to 7 in the batch.
    """

    policy: str
    version: PolicyVersion
    episodes: tuple[TrainEpisode, ...]

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that policies drew, in the loss or not."""
        return int(sum(t.trajectory.sampled.sum() for e in self.episodes for t in e.trajectories))

    @property
    def num_pinned_tokens(self) -> int:
        """Of the sampled tokens those that forks have from their parents."""
        return sum(episode.pinned_tokens for episode in self.episodes)

    @property
    def num_trained_tokens(self) -> int:
        """Tokens that enter the loss."""
        masks = (t.loss_mask for e in self.episodes for t in e.trajectories)
        return int(sum(mask.sum() for mask in masks))


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did: the new version, and scalars named ``area/quantity_unit``."""

    version: PolicyVersion
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Canary:
    """A few tokens and what the trainer says of them: log-probabilities of tokens 1 to n-1 at temperature 1.

    `next_ids` are the tokens that may follow, likeliest first, and `next_logprobs` theirs; both are empty where an
    engine is not to draw any.

    Example: ids ``(5, 17, 3)``, logprobs ``(-1.25, -0.5)``, next ids ``(8, 2)`` and their logprobs ``(-0.3, -1.9)``.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    next_ids: tuple[int, ...] = ()
    next_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightsManifest:
    """Weights of one version, staged where engines can read them.

    `checksums` maps tensor names to digests, so that a receipt can be compared; for narrower dtypes that
    engines may serve in, the names begin with the dtype, such as ``bfloat16:lm_head.weight``. `canary` is
    computed by the trainer with these very weights.
    `unchanged_since` is the oldest version known to have these very weights, to the bit: the version itself after a
    step that learned something, an earlier one after a step that had nothing to learn from, None
    where nobody knows.
    `kind` says whether the folder holds a whole model or only an adapter (PEFT's files and names) on the first one.
    """

    policy: str
    version: PolicyVersion
    path: str
    checksums: dict[str, str]
    num_bytes: int
    canary: Canary | None = None
    kind: Literal["full", "adapter"] = "full"
    unchanged_since: PolicyVersion | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """An engine's proof of what it serves after a load.

    `seconds` are of the whole publication to it, `gap_s` of the pause in it. `sentinel` is the token that it drew
    greedily behind the canary, with its log-probability; None if the canary does not say what may follow.
    """

    engine: str
    version: PolicyVersion
    checksums: dict[str, str]
    seconds: float
    aborted: int
    gap_s: float = 0.0
    sentinel: tuple[int, float] | None = None
