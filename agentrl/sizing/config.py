"""The file of latencies: what a person knows of the parts of a run, in TOML."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Annotated

from pydantic import Field, model_validator

from agentrl.config.base import ConfigModel, parse_config
from agentrl.config.loading import load_table
from agentrl.sizing.latencies import ROUGH, DecodeCurve, EpisodeShape, Latencies, Measured, Shapes
from agentrl.types.errors import ConfigError

Seconds = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
_NUM_SHAPES = 512
_P95 = NormalDist().inv_cdf(0.95)


class Spread(ConfigModel):
    """A lognormal distribution; the same median and p95 are a constant."""

    median: Positive
    """Half of the values are below."""
    p95: Positive
    """One in twenty is above. Ten times the median is a heavy tail."""

    @model_validator(mode="after")
    def _rises(self) -> Spread:
        if self.p95 < self.median:
            raise ValueError(f"p95 {self.p95:g} is below the median {self.median:g}: give at least the median")
        return self


class EngineLatencies(ConfigModel):
    """One engine."""

    tokens_per_s: Annotated[dict[Annotated[int, Field(gt=0)], Positive], Field(min_length=1)] | None = None
    """Tokens a second of the whole engine by the number of sequences that it decodes at once; two points or more tell
    how it grows. Measure it, or take it from the engine's log."""
    slots: Positive | None = None
    """Sequences at once; the rest waits."""
    request_s: Seconds | None = None
    """Seconds from a request to its first token, beside prefill."""
    prefill_tokens_per_s: Positive | None = None
    """Tokens of a prompt a second; meanwhile the engine decodes nothing."""


class EnvironmentLatencies(ConfigModel):
    """The environment of an episode."""

    start_s: Seconds | None = None
    """Seconds to open it."""
    step_s: Spread | None = None
    """Seconds of a step."""
    score_s: Seconds | None = None
    """Seconds of its verdict, at the end of play."""
    slots: Positive | None = None
    """Calls that it serves at once, all episodes together; none sets no bound."""


class ScorerLatencies(ConfigModel):
    """A scorer that steps wait for."""

    call_s: Seconds
    """Seconds of a call: of an episode, or of a batch of turns."""


class TrainerLatencies(ConfigModel):
    """The trainer."""

    fixed_s: Seconds | None = None
    """Seconds of a step beside its tokens, taking the batch included."""
    tokens_per_s: Positive | None = None
    """Tokens a second, prompts included, in one pass over the batch by `ranks` ranks."""
    ranks: Annotated[int, Field(gt=0)] | None = None
    """Ranks of which tokens_per_s is."""
    scaling: Annotated[float, Field(ge=0, le=1)] | None = None
    """How its speed grows with ranks: by ``ranks ** scaling``; 1 is perfect."""


class PublishLatencies(ConfigModel):
    """A publication of weights."""

    stage_s: Seconds | None = None
    """Seconds after a step in which the trainer writes its weights."""
    load_s: Seconds | None = None
    """Seconds from there until engines serve them, pause included, where nothing is in flight."""
    pause_s: Seconds | None = None
    """Seconds of it that an engine stands still."""
    interrupt_s: Seconds | None = None
    """Seconds that each sequence in flight adds to both: it is aborted, and asked for again."""


class EpisodeLengths(ConfigModel):
    """How long episodes are, in turns and tokens."""

    turns: Spread | None = None
    """Replies of an episode; at least one."""
    reply_tokens: Spread | None = None
    """Tokens of a reply."""
    prompt_tokens: Positive | None = None
    """Tokens before the first reply, all of which are computed."""
    tool_tokens: Seconds | None = None
    """Tokens that the environment adds behind each reply."""
    dropped_groups: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Fraction of the groups that the filter or failures take out."""


class LatencyFile(ConfigModel):
    """What is known of the parts; what is left out is taken from a run, or is a rough default."""

    engine: EngineLatencies = EngineLatencies()
    """The engines."""
    environment: EnvironmentLatencies = EnvironmentLatencies()
    """The environments."""
    scorers: dict[str, ScorerLatencies] = Field(default_factory=dict)
    """Scorers by their names in the recipe."""
    trainer: TrainerLatencies = TrainerLatencies()
    """The trainer."""
    publish: PublishLatencies = PublishLatencies()
    """Publications."""
    episodes: EpisodeLengths = EpisodeLengths()
    """Lengths of episodes."""

    def over(self, base: Latencies, source: str) -> Latencies:
        """What the file says, and of the rest what `base` says; episodes are the file's as soon as it names one."""

        def figure(value: float | None, unit: str, other: Measured) -> Measured:
            return other if value is None else Measured(value, unit, source)

        def inverse(rate: float | None, unit: str, other: Measured) -> Measured:
            return other if rate is None else Measured(1 / rate, unit, source)

        engine, environment, trainer, publish = self.engine, self.environment, self.trainer, self.publish
        found = replace(
            base,
            engine_slots=figure(engine.slots, "sequences", base.engine_slots),
            request_s=figure(engine.request_s, "s", base.request_s),
            prefill_token_s=inverse(engine.prefill_tokens_per_s, "s/token", base.prefill_token_s),
            environment_start_s=figure(environment.start_s, "s", base.environment_start_s),
            environment_score_s=figure(environment.score_s, "s", base.environment_score_s),
            environment_slots=figure(environment.slots, "calls", base.environment_slots),
            trainer_fixed_s=figure(trainer.fixed_s, "s", base.trainer_fixed_s),
            trainer_token_s=inverse(trainer.tokens_per_s, "s/token", base.trainer_token_s),
            ranks=figure(trainer.ranks, "ranks", base.ranks),
            scaling=figure(trainer.scaling, "exponent", base.scaling),
            stage_s=figure(publish.stage_s, "s", base.stage_s),
            publish_s=figure(publish.load_s, "s", base.publish_s),
            pause_s=figure(publish.pause_s, "s", base.pause_s),
            interrupt_s=figure(publish.interrupt_s, "s/sequence", base.interrupt_s),
            dropped_groups=figure(self.episodes.dropped_groups, "fraction", base.dropped_groups),
            scorers={**base.scorers, **{name: Measured(s.call_s, "s", source) for name, s in self.scorers.items()}},
        )
        if engine.tokens_per_s is not None:
            points = tuple(sorted((float(number), rate) for number, rate in engine.tokens_per_s.items()))
            found = replace(found, decode=DecodeCurve(points, source))
        return replace(found, shapes=self._shapes(base.shapes, source))

    def _shapes(self, base: Shapes, source: str) -> Shapes:
        """Episodes drawn from the distributions; a measured episode's steps may be given other times."""
        lengths, step_s = self.episodes, self.environment.step_s
        named = (lengths.turns, lengths.reply_tokens, lengths.prompt_tokens, lengths.tool_tokens)
        rng = random.Random(0)
        if all(value is None for value in named):
            if step_s is None:
                return base
            slower = (
                replace(shape, environment_s=tuple(_value(step_s, rng) for _ in shape.environment_s))
                for shape in base.episodes
            )
            return Shapes(tuple(slower), f"{base.source}; steps: {source}")
        drawn = (_draw(lengths, step_s or _STEP_S, rng) for _ in range(_NUM_SHAPES))
        return Shapes(tuple(drawn), source)


_TURNS, _REPLY_TOKENS, _STEP_S = (
    Spread(median=4, p95=8),
    Spread(median=200, p95=1000),
    Spread(median=0.05, p95=0.5),
)


def _draw(lengths: EpisodeLengths, step_s: Spread, rng: random.Random) -> EpisodeShape:
    turns = max(1, round(_value(lengths.turns or _TURNS, rng)))
    first, later = _or(lengths.prompt_tokens, 500.0), _or(lengths.tool_tokens, 100.0)
    return EpisodeShape(
        (first, *[later] * (turns - 1)),
        tuple(max(1.0, _value(lengths.reply_tokens or _REPLY_TOKENS, rng)) for _ in range(turns)),
        tuple(_value(step_s, rng) for _ in range(turns)),
    )


def _value(spread: Spread, rng: random.Random) -> float:
    """One value of a lognormal distribution."""
    return spread.median * math.exp(math.log(spread.p95 / spread.median) / _P95 * rng.gauss(0, 1))


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def rough_latencies() -> Latencies:
    """Figures of no machine in particular: a model of some billion parameters on one GPU, tools that answer at once.

    They are there so that a plan can be made of the few figures that are known; each is marked in the plan's table.
    """

    def rough(value: float, unit: str) -> Measured:
        return Measured(value, unit, ROUGH)

    rng = random.Random(0)
    shapes = tuple(_draw(EpisodeLengths(), _STEP_S, rng) for _ in range(_NUM_SHAPES))
    return Latencies(
        decode=DecodeCurve(((1.0, 80.0), (64.0, 3200.0), (256.0, 6300.0)), ROUGH),
        engine_slots=rough(256, "sequences"),
        request_s=rough(0.02, "s"),
        prefill_token_s=rough(1 / 40_000, "s/token"),
        shapes=Shapes(shapes, ROUGH),
        environment_start_s=rough(0.05, "s"),
        environment_score_s=rough(0.05, "s"),
        environment_slots=rough(math.inf, "calls"),
        trainer_fixed_s=rough(2.0, "s"),
        trainer_token_s=rough(1 / 8000, "s/token"),
        ranks=rough(1, "ranks"),
        scaling=rough(0.9, "exponent"),
        stage_s=rough(1.0, "s"),
        publish_s=rough(2.0, "s"),
        pause_s=rough(0.5, "s"),
        interrupt_s=rough(0.0, "s/sequence"),
        dropped_groups=rough(0.0, "fraction"),
    )


def load_latencies(file: Path | None, settings: Iterable[str], base: Latencies) -> Latencies:
    """A file's figures and ``key.path=value`` settings, laid over others. Raises ConfigError."""
    settings = list(settings)
    if file is not None and not file.is_file():
        raise ConfigError(f"no file of latencies at {file}; give a TOML file with sections such as [engine]")
    known = base
    if file is not None:
        known = parse_config(LatencyFile, load_table(file), str(file)).over(base, str(file))
    if not settings:
        return known
    # Laid over nothing, so that the plan's table says where each is from.
    table = load_table(Path(os.devnull), settings)
    return parse_config(LatencyFile, table, "--set", settings).over(known, "--set")
