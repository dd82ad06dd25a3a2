"""Builds what plays episodes from a run's configuration."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from agentrl import registry
from agentrl.buffer.step_journal import StepJournal
from agentrl.envs.hosting import build_described_host, build_host, nobody_hears
from agentrl.envs.process import WarmWorkers
from agentrl.gateway.starting import check_installed
from agentrl.inference.fleet import Fleet
from agentrl.orchestration.config import EnvironmentSection, RunConfig
from agentrl.orchestration.scoring import LateScorer
from agentrl.process.place import Places
from agentrl.protocols import EnvironmentHost, Scaffold
from agentrl.rollouts.config import ScaffoldConfig
from agentrl.rollouts.episode_log import EpisodeJournal
from agentrl.rollouts.programs import Gateway
from agentrl.rollouts.recorded_replies import Generating
from agentrl.rollouts.runner import EpisodeRunner, Player
from agentrl.scorers.combined import CombinedConfig, in_order
from agentrl.scorers.config import FunctionScorerConfig, VerifierConfig
from agentrl.scorers.definition import ScorerSetting, ServedPolicy, Snapshot, TurnScorerConfig
from agentrl.scorers.function import FunctionScorer
from agentrl.scorers.verifier import Verifier
from agentrl.scoring.feed import TurnFeed
from agentrl.scoring.queue import ScorerQueue
from agentrl.scoring.tier import Judges, Known, ScoringTier
from agentrl.scoring.workers import worker_start
from agentrl.telemetry.run_traces import RunTraces
from agentrl.tokens.chat import ChatFormat
from agentrl.types.environment import EnvironmentDescription
from agentrl.types.errors import ConfigError
from agentrl.types.program import RunsPrograms


def build_scaffold(config: ScaffoldConfig) -> Scaffold:
    """The configured scaffold. Raises ConfigError if it is unknown or refuses its options."""
    kind = registry.load_plugin(registry.SCAFFOLDS, config.name)
    if not callable(kind):
        raise ConfigError(f"scaffold '{config.name}' is a {type(kind).__name__}, not a class")
    try:
        scaffold: object = kind(**config.options)
    except TypeError as error:
        raise ConfigError(f"scaffold '{config.name}' does not take options {config.options}: {error}") from error
    if not isinstance(scaffold, Scaffold):
        raise ConfigError(f"scaffold '{config.name}' is a {type(scaffold).__name__}, which has no `run`")
    if isinstance(scaffold, RunsPrograms):
        check_installed()
    return scaffold


async def build_hosts(
    config: RunConfig,
    logs: Path,
    plays: bool = True,
    known: Mapping[str, EnvironmentDescription] | None = None,
    on_phase: Callable[[str], object] = nobody_hears,
) -> dict[str, EnvironmentHost]:
    """Where the instances of each of the run's environments live; unless they are `known`, they describe themselves.

    Of an environment that is placed inline, a process that `plays` no episodes has workers too: it needs tasks alone.

    Waits for: the descriptions, all at once, and virtual environments that must be made for them, which `on_phase` is
    told of. Unblocked by: these, or their deadlines.

    Raises:
        ConfigError: an environment cannot be loaded, or refuses its options.
    """
    # Twice as many as play at once: the next episode of each environment may find one, and evaluation has some too.
    warm = WarmWorkers(2 * config.rollout.concurrency)

    async def build(name: str, section: EnvironmentSection) -> EnvironmentHost:
        is_apart = section.placement == "inline" and not plays
        placed = section.model_copy(update={"placement": "process"} if is_apart else {})
        call_s, label = config.limits_of(name).tool_s, f"environment-{name}"
        if known is not None:
            return build_described_host(placed, known[name], call_s, logs, label, warm)
        return await build_host(placed, call_s, logs, label, on_phase=on_phase, warm=warm)

    outcomes = await asyncio.gather(
        *(build(name, section) for name, section in config.environments.items()), return_exceptions=True
    )
    hosts = {
        name: host
        for name, host in zip(config.environments, outcomes, strict=True)
        if not isinstance(host, BaseException)
    }
    failure = next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)
    if failure is not None:
        await asyncio.gather(*(host.close() for host in hosts.values()))
        raise failure
    return hosts


def build_runners(
    config: RunConfig,
    engines: Mapping[str, Generating],
    chats: Mapping[str, ChatFormat],
    hosts: Mapping[str, EnvironmentHost],
    journal: EpisodeJournal,
    gateway: Gateway,
) -> dict[str, EpisodeRunner]:
    """A runner for each environment, over an engine or a router of engines for each policy. Raises ConfigError."""
    players = {policy: _build_player(config, policy, engines[policy], chats[policy]) for policy in config.acting}
    return {
        name: EpisodeRunner(
            players={agent: players[policy] for agent, policy in config.agents_of(name).items()},
            scaffold=build_scaffold(section.scaffold),
            environments=hosts[name],
            verifier=_build_verifier(section, config.limits_of(name).tool_s),
            journal=journal,
            limits=config.limits_of(name).build(),
            gateway=gateway,
        )
        for name, section in config.environments.items()
    }


def build_tier(
    config: RunConfig,
    fleets: Mapping[str, Fleet],
    snapshots: Mapping[str, Snapshot],
    logs: Path,
    journal: StepJournal,
    known: Known,
    places: Places,
    traces: RunTraces | None = None,
) -> ScoringTier:
    """The scorers of turns of each environment, not opened yet; environments that say the same share one.

    Raises ConfigError.
    """
    served = {name: ServedPolicy(config.policies[name].model, fleet) for name, fleet in fleets.items()}
    shared: dict[str, ScorerQueue] = {}

    def queue(scorer: TurnScorerConfig) -> ScorerQueue:
        settings = scorer.model_dump_json()
        if settings not in shared:
            models = {policy: config.policies[policy].model for policy in scorer.policies or config.acting}
            setting = ScorerSetting(models, {name: served[name] for name in scorer.uses_policies()}, snapshots)
            start = worker_start(scorer, setting, logs, places)
            shared[settings] = ScorerQueue(scorer, start, journal.turns_scored, traces)
        return shared[settings]

    queues = {
        name: [queue(scorer) for scorer in _of_turns(section) if not isinstance(scorer, CombinedConfig)]
        for name, section in config.environments.items()
    }
    combined = {
        name: in_order(scorer for scorer in section.scorers if isinstance(scorer, CombinedConfig))
        for name, section in config.environments.items()
    }
    feed = TurnFeed(lambda environment, agent: config.agents_of(environment)[agent])
    required = {name: frozenset(config.required_scorers(name)) for name in queues}
    judges = {name: Judges(queues[name], combined[name], required[name]) for name in config.environments}
    return ScoringTier(judges, feed, journal, known)


def _of_turns(section: EnvironmentSection) -> list[TurnScorerConfig]:
    return [scorer for scorer in section.scorers if isinstance(scorer, TurnScorerConfig)]


def build_scorers(config: RunConfig) -> dict[str, list[LateScorer]]:
    """Of each environment the scorers that need no live environment. Raises ConfigError."""
    return {
        name: [
            LateScorer(_build_function_scorer(scorer), scorer.if_missing == "leave_out")
            for scorer in section.scorers
            if isinstance(scorer, FunctionScorerConfig)
        ]
        for name, section in config.environments.items()
    }


def _build_player(config: RunConfig, policy: str, engine: Generating, chat: ChatFormat) -> Player:
    sampling, limits = config.sampling_of(policy), config.policies[policy].limits
    routing = routing_of(config.policies[policy].model) if sampling.routed_experts else None
    return Player(policy, engine, chat, sampling.build(routing), limits.build() if limits is not None else None)


def _build_verifier(section: EnvironmentSection, timeout_s: float) -> Verifier | None:
    found = [scorer for scorer in section.scorers if isinstance(scorer, VerifierConfig)]
    return Verifier(timeout_s, found[0].name, found[0].weight) if found else None


def _build_function_scorer(config: FunctionScorerConfig) -> FunctionScorer:
    function = registry.load_target(config.function)
    if not callable(function):
        raise ConfigError(f"scorer '{config.name}': {config.function} is a {type(function).__name__}, not a function")
    return FunctionScorer(function, config.name, config.weight, config.timeout_s)


def routing_of(model: Path) -> tuple[int, int]:
    """Layers of a model folder and the experts that each token uses in one of them.

    Raises:
        ConfigError: the model has no experts, or cannot be read.
    """
    try:
        settings = json.loads((model / "config.json").read_text())
        return int(settings["num_hidden_layers"]), int(settings["num_experts_per_tok"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"rollout.sampling.routed_experts needs a model with experts; {model}/config.json does not describe "
            f"one ({type(error).__name__}: {error})"
        ) from error
