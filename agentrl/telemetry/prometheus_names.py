"""What a run serves to Prometheus: stable names, and which of the run's own metrics each comes from."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """One name: a counter if it ends in ``_total``, else a gauge, with its labels and what it says.

    `source` is a pattern of names in ``metrics.jsonl``, whose groups are labels; without one the run gives the value
    itself. `is_summed` adds up what the rows of all steps say.

    Example: ``requests/resent_(?P<reason>[a-z]+)_total`` makes ``agentrl_requests_resent_total{reason="fenced"}`` of
    ``requests/resent_fenced_total``.
    """

    name: str
    labels: tuple[str, ...]
    meaning: str
    source: str = ""
    is_summed: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a family, with its labels in the family's order."""

    family: str
    labels: tuple[str, ...]
    value: float


_P, _SCORER = ("policy",), "scorer/(?P<scorer>[^/]+)/"
FAMILIES = (
    Family("agentrl_run_info", ("run", "version", "runtime"), "1; which run this is"),
    Family("agentrl_run_start_time_seconds", (), "Unix time at which the run's process began"),
    Family("agentrl_goal_steps", (), "Steps at which the run ends"),
    Family("agentrl_disk_free_bytes", (), "Free in the file system of the run's folder"),
    Family("agentrl_disk_size_bytes", (), "Size of the file system of the run's folder"),
    Family("agentrl_policy_step", _P, "Step of the trainer's newest version"),
    Family("agentrl_policy_served_step", _P, "Step of the version that engines were last proven to serve"),
    Family("agentrl_steps_total", _P, "Steps that this process made"),
    Family("agentrl_last_step_timestamp_seconds", _P, "Unix time of the newest step, or of the start before the first"),
    Family("agentrl_step_seconds_total", _P, "From the end of a step to the end of the next", "time/step_s", True),
    Family("agentrl_train_step_seconds_total", _P, "The trainer's own time", "time/train_step_s", True),
    Family("agentrl_wait_for_batch_seconds_total", _P, "Waited for episodes", "time/wait_for_batch_s", True),
    Family("agentrl_trained_tokens_total", _P, "Sampled tokens in the loss", "batch/trained_tokens", True),
    Family("agentrl_trainer_tokens_per_second", _P, "Through the trainer in its newest step", "trainer/tokens_per_s"),
    Family("agentrl_loss_nats", _P, "Loss of the newest step", "trainer/loss"),
    Family("agentrl_grad_norm_ratio", _P, "Norm of the newest step's gradient", "trainer/grad_norm"),
    Family("agentrl_kl_k3_nats", _P, "Divergence of sampling and trained policy", "trainer/kl_k3_nats"),
    Family("agentrl_fresh_gap_max_nats", _P, "Trainer and engine on fresh tokens", "trainer/fresh_gap_max_nats"),
    Family("agentrl_fresh_gap_bound_nats", _P, "Gap from which on the trainer leaves sequences out"),
    Family("agentrl_staleness_max_steps", _P, "Largest staleness of a trained token", "buffer/staleness_max_steps"),
    Family("agentrl_staleness_mean_steps", _P, "Mean staleness of the batch", "buffer/staleness_mean_steps"),
    Family("agentrl_staleness_bound_steps", _P, "The recipe's max_staleness; none where it is unbounded"),
    Family("agentrl_masked_ratio", _P, "Of the batch's sampled tokens, not in the loss", "buffer/masked_fraction"),
    Family("agentrl_batch_reward_mean", _P, "Mean reward of the newest batch", "batch/reward_mean"),
    Family("agentrl_eval_reward_mean", _P, "Mean reward of the newest evaluation", "eval/reward_mean"),
    Family("agentrl_eval_failed_episodes", _P, "Failed episodes of the newest evaluation", "eval/failed_episodes"),
    Family("agentrl_episodes_running", (), "Episodes in play"),
    Family("agentrl_episodes_ready", _P, "Episodes that wait for the trainer"),
    Family("agentrl_episodes_total", ("policy", "outcome"), "Episodes that ended, by how"),
    Family("agentrl_episode_failures_total", ("policy", "reason"), "Failed episodes, by boundary and kind"),
    Family("agentrl_sampled_tokens_total", ("outcome",), "Sampled tokens of finished episodes, by what became of them"),
    Family("agentrl_turns_total", (), "Turns put on record", "workers/turns_total"),
    Family("agentrl_engines", ("policy", "state"), "Engines by state", "engines/(?P<state>[a-z]+)"),
    Family("agentrl_engine_up", ("policy", "engine"), "1 for an engine that serves, else 0"),
    Family("agentrl_engine_requests", ("policy", "engine"), "Requests that are with an engine"),
    Family("agentrl_engine_restarts_total", _P, "Engines that took a dead one's place", "engines/restarts_total"),
    Family("agentrl_engine_distrusted_total", _P, "Engines set aside, unproven", "engines/distrusted_total"),
    Family(
        "agentrl_requests_resent_total",
        ("policy", "reason"),
        "Requests sent again",
        "requests/resent_(?P<reason>[a-z]+)_total",
    ),
    Family("agentrl_requests_regenerated_total", _P, "Tokens drawn in vain", "requests/regenerated_total"),
    Family("agentrl_requests_interrupted_total", _P, "Replies cut short, and continued", "requests/interrupted_total"),
    Family("agentrl_publish_receipts_total", _P, "Receipts that proved their engine", "publish/receipts_total"),
    Family("agentrl_publish_refused_receipts_total", _P, "Receipts refused", "publish/refused_receipts_total"),
    Family(
        "agentrl_publish_failed_total",
        ("policy", "reason"),
        "Engines that failed a publication, by phase",
        "publish/failed_(?P<reason>[a-z]+)_total",
    ),
    Family("agentrl_publish_resyncs_total", _P, "Engines that came back with a receipt", "publish/resyncs_total"),
    Family("agentrl_publish_paused_seconds_total", _P, "Pauses, summed over engines", "publish/paused_s_total"),
    Family("agentrl_publish_gap_max_seconds", _P, "Longest pause of an engine", "publish/gap_max_s"),
    Family("agentrl_publish_sent_bytes_total", _P, "Moved by the transport", "publish/sent_bytes_total"),
    Family("agentrl_publish_seconds", _P, "A publication to its slowest receipt, mean", "time/publish_s"),
    Family("agentrl_workers_running", (), "Rollout workers", "workers/running"),
    Family("agentrl_worker_restarts_total", (), "Worker processes replaced", "workers/restarts_total"),
    Family("agentrl_episodes_handed_over_total", (), "Went on in another worker", "workers/handed_over_total"),
    Family("agentrl_episodes_given_up_total", (), "Cost too many workers", "workers/given_up_total"),
    Family("agentrl_scorer_waiting_turns", ("scorer",), "Turns in the line", f"{_SCORER}waiting_turns"),
    Family(
        "agentrl_scorer_turns_total",
        ("scorer", "outcome"),
        "Turns by what became of them in the line",
        f"{_SCORER}(?P<outcome>scored|failed|cached|not_sent|forgotten)_total",
    ),
    Family(
        "agentrl_scorer_deadline_misses_total",
        ("scorer",),
        "Episodes not judged in time",
        f"{_SCORER}deadline_misses_total",
    ),
    Family("agentrl_scorer_queue_delay_seconds", ("scorer",), "In the line, mean", f"{_SCORER}queue_delay_s"),
    Family("agentrl_scorer_workers", ("scorer",), "Workers of a scorer", f"{_SCORER}workers"),
    Family(
        "agentrl_scorer_workers_lost_total", ("scorer",), "Workers that died or hung", f"{_SCORER}workers_lost_total"
    ),
    Family(
        "agentrl_scorer_held_admission_seconds_total", (), "No episode began, for a scorer", "scorer/held_admission_s"
    ),
    Family("agentrl_sandbox_events_total", ("reason",), "What sandboxes count", "sandbox/(?P<reason>[a-z_]+)_total"),
    Family(
        "agentrl_trace_episodes_total",
        ("outcome",),
        "Episodes whose spans are written, and that are left out",
        "trace/(?P<outcome>traced|left_out)_episodes_total",
    ),
)
_SOURCES = [(family, re.compile(family.source)) for family in FAMILIES if family.source]


def samples_of(metrics: Mapping[str, float], policy: str, is_summed: bool = False) -> Iterator[Sample]:
    """What metrics of a policy, without its prefix, come to; of those alone that are summed, or that are not."""
    for family, source in _SOURCES:
        for name, value in metrics.items() if family.is_summed is is_summed else ():
            if (found := source.fullmatch(name)) is not None:
                words = {"policy": policy, **found.groupdict()}
                yield Sample(family.name, tuple(words[label] for label in family.labels), value)


class StepNumbers:
    """Keeps what the rows of ``metrics.jsonl`` say: the newest of some, the sum over all rows of others.

    Of several `policies` the names of each one's metrics begin with its own. `num_steps` counts the steps of each,
    `last_step` has its newest with the Unix time.
    """

    def __init__(self, policies: Sequence[str]) -> None:
        self._prefixes = {f"{name}/" if len(policies) > 1 else "": name for name in policies}
        self._newest: dict[tuple[str, tuple[str, ...]], Sample] = {}
        self._sums: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        self.num_steps: Counter[str] = Counter()
        self.last_step: dict[str, tuple[int, float]] = {}

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Take one row in."""
        for prefix, policy in self._prefixes.items():
            numbers = {name: value for name, value in metrics.items() if not isinstance(value, str)}
            own = {n.removeprefix(prefix): float(v) for n, v in numbers.items() if n.startswith(prefix)}
            if "time/step_s" in own:
                self.num_steps[policy] += 1
                self.last_step[policy] = step, time.time()
            self._newest.update({(s.family, s.labels): s for s in samples_of(own, policy)})
            for sample in samples_of(own, policy, is_summed=True):
                self._sums[sample.family, sample.labels] += sample.value

    def samples(self) -> Iterator[Sample]:
        """All of it."""
        yield from self._newest.values()
        yield from (Sample(family, labels, value) for (family, labels), value in self._sums.items())

    def close(self) -> None:
        """Nothing to close."""
