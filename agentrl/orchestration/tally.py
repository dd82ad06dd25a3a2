"""What happened since a policy's last step: episodes, turns, ends, publications."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from agentrl.types.batch import Receipt
from agentrl.types.episode import Episode


def metric_prefix(policy: str, policies: Collection[str]) -> str:
    """What begins the names of a policy's metrics: its name, where the run trains several policies."""
    return f"{policy}/" if len(policies) > 1 else ""


class Tally:
    """Counts between two steps of one policy; `prefix` begins the names of its metrics.

    Episodes of other environments than those that it is trained in do not count. An episode's reward is that of the
    agents that act by the policy, their mean if there are several. With several environments there are counts of each,
    under ``environment/NAME/``. `outcomes` and `failures` count episodes since the process began.
    """

    def __init__(self, policy: str, prefix: str, environments: Collection[str] = ()) -> None:
        self.policy, self.prefix, self.environments = policy, prefix, tuple(environments)
        self._counts: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._rewards: dict[str, list[float]] = {}
        self._failed: Counter[str] = Counter()
        self._gaps_s: list[float] = []
        self._since = time.monotonic()

    def named(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics under the policy's names."""
        return {f"{self.prefix}{name}": value for name, value in metrics.items()}

    def add(self, episode: Episode) -> None:
        """Count an episode that is over."""
        environment = episode.ticket.environment
        if environment not in self.environments:
            return
        self._counts["episodes"] += 1
        self.outcomes[episode.outcome] += 1
        self._counts["turns"] += len(episode.turns)
        self._counts["sampled_tokens"] += episode.num_sampled_tokens
        self._counts["aborts"] += sum(turn.aborts for turn in episode.turns)
        if episode.failure is not None:
            self._counts["failed"] += 1
            self._counts[f"failed_{episode.failure.boundary}_{episode.failure.kind}"] += 1
            self.failures[f"{episode.failure.boundary}_{episode.failure.kind}"] += 1
        elif episode.stop_reason is not None:
            self._counts[f"stopped_{episode.stop_reason}"] += 1
        for name, count in episode.counts.items():
            self._counts[f"program/{name}"] += count
        self._failed[environment] += episode.failure is not None
        rewards = self._rewards.setdefault(environment, [])
        if own := episode.rewards_of(self.policy):
            rewards.append(sum(own.values()) / len(own))

    def add_publication(self, receipts: Sequence[Receipt]) -> None:
        """Count a publication."""
        self._counts["publish_ms"] += round(1000 * max(receipt.seconds for receipt in receipts))
        self._counts["published"] += 1
        self._gaps_s += [receipt.gap_s for receipt in receipts]

    def take(self) -> dict[str, float]:
        """What was counted, from 0 on again; the mean of nothing is left out, since it is not 0."""
        now = time.monotonic()
        metrics = {**self._rollout_metrics(), **self._environment_metrics(), "time/step_s": now - self._since}
        for counted in (self._counts, self._rewards, self._failed, self._gaps_s):
            counted.clear()
        self._since = now
        return metrics

    def _environment_metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name in self.environments if len(self.environments) > 1 else ():
            rewards = self._rewards.get(name, [])
            metrics[f"environment/{name}/scored_episodes"] = float(len(rewards))
            metrics[f"environment/{name}/failed_episodes"] = float(self._failed[name])
            if rewards:
                metrics[f"environment/{name}/reward_mean"] = sum(rewards) / len(rewards)
        return metrics

    def _rollout_metrics(self) -> dict[str, float]:
        counts = self._counts
        metrics = {
            "rollout/episodes": float(counts["episodes"]),
            "rollout/aborted_generations": float(counts["aborts"]),
        }
        if rewards := [reward for of_environment in self._rewards.values() for reward in of_environment]:
            metrics["rollout/reward_mean"] = sum(rewards) / len(rewards)
        if counts["published"]:
            metrics["time/publish_s"] = counts["publish_ms"] / 1000 / counts["published"]
        if self._gaps_s:
            metrics["publish/gap_max_s"] = max(self._gaps_s)
        if not counts["episodes"]:
            return metrics
        for name in ("turns", "sampled_tokens"):
            metrics[f"rollout/{name}_mean"] = counts[name] / counts["episodes"]
        metrics["rollout/failed_fraction"] = counts["failed"] / counts["episodes"]
        for name, count in counts.items():
            if name.startswith(("failed_", "stopped_")):
                metrics[f"rollout/{name}_fraction"] = count / counts["episodes"]
            elif name.startswith("program/"):
                metrics[name] = float(count)
        return metrics
