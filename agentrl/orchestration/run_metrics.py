"""What a run serves to Prometheus, as it stands at the moment of a scrape."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata

from agentrl.inference.fleet import EngineState
from agentrl.orchestration.assembly import RunParts
from agentrl.telemetry.prometheus_names import Sample, samples_of

_STARTED_S = time.time()


@contextmanager
def serving_metrics(parts: RunParts) -> Iterator[None]:
    """Metrics are served inside, if the recipe asks for it. Raises ConfigError if the port is taken."""
    config = parts.config.telemetry
    if config.metrics_port is None:
        yield
        return
    from agentrl.telemetry.prometheus import PrometheusServer

    server = PrometheusServer(config.metrics_host, config.metrics_port, partial(live_samples, parts))
    try:
        yield
    finally:
        server.close()


def live_samples(parts: RunParts) -> Iterator[Sample]:
    """Everything; of what is counted for a policy and for the run alike, one each."""
    config, run = parts.config, parts.run.path
    yield Sample("agentrl_run_info", (run.name, metadata.version("agentrl"), config.runtime.kind), 1.0)
    yield Sample("agentrl_run_start_time_seconds", (), _STARTED_S)
    yield Sample("agentrl_goal_steps", (), float(config.steps))
    disk = shutil.disk_usage(run)
    yield Sample("agentrl_disk_free_bytes", (), float(disk.free))
    yield Sample("agentrl_disk_size_bytes", (), float(disk.total))
    yield Sample("agentrl_episodes_running", (), float(parts.buffer.num_running))
    for outcome, tokens in parts.buffer.ledger.tokens.items():
        yield Sample("agentrl_sampled_tokens_total", (outcome,), float(tokens))
    yield from parts.recorder.numbers.samples()
    for policy in parts.policies:
        counted = {**parts.counted(policy), **parts.traces.metrics()}
        yield from samples_of(counted, policy)
        yield from _engines(parts, policy)
    for policy in config.trained:
        yield from _policy(parts, policy)


def _engines(parts: RunParts, policy: str) -> Iterator[Sample]:
    for name, member in parts.policies[policy].serving.fleet.members.items():
        yield Sample("agentrl_engine_up", (policy, name), float(member.state is EngineState.HEALTHY))
        yield Sample("agentrl_engine_requests", (policy, name), float(member.num_requests))


def _policy(parts: RunParts, policy: str) -> Iterator[Sample]:
    """A trained policy's steps, bounds and episodes."""
    numbers, recorder = parts.recorder.numbers, parts.recorder
    last = numbers.last_step.get(policy)
    step, at_s = last if last is not None else (parts.start.versions[policy].step, _STARTED_S)
    yield Sample("agentrl_policy_step", (policy,), float(step))
    yield Sample("agentrl_policy_served_step", (policy,), float(parts.buffer.loaded_version(policy).step))
    yield Sample("agentrl_steps_total", (policy,), float(numbers.num_steps[policy]))
    yield Sample("agentrl_last_step_timestamp_seconds", (policy,), at_s)
    yield Sample("agentrl_episodes_ready", (policy,), float(parts.buffer.num_ready(policy)))
    bound = parts.config.buffer_of(policy).max_staleness
    if bound != "unbounded":
        yield Sample("agentrl_staleness_bound_steps", (policy,), float(bound))
    yield Sample("agentrl_fresh_gap_bound_nats", (policy,), parts.config.policies[policy].trainer.max_gap_nats)
    for outcome, number in recorder.outcomes(policy).items():
        yield Sample("agentrl_episodes_total", (policy, outcome), float(number))
    for reason, number in recorder.failures(policy).items():
        yield Sample("agentrl_episode_failures_total", (policy, reason), float(number))
