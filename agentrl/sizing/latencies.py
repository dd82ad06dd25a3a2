"""What the parts of a run take, each figure with its unit and where it was measured."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

ROUGH = "rough default"


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure. Example: ``Measured(0.8, "s", "runs/sql-demo-seed0")``."""

    value: float
    unit: str
    source: str

    def faster(self, factor: float) -> Measured:
        """The same part, so many times as fast."""
        return replace(self, value=self.value / factor)


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """Tokens a second of one engine by the number of sequences that it decodes at once.

    Seconds of a token, ``n / tokens_per_s``, are linear between the points. Beyond the last they go on along the last
    two, where one point alone means that the engine is full: more sequences share its tokens. Below the first
    likewise, and never faster than that.

    Example: points (1, 50) and (64, 1600) take 0.02 and 0.04 s a token; 32 sequences take 0.0298 s, 1073 tokens/s.
    """

    points: tuple[tuple[float, float], ...]  # (sequences, tokens/s), rising
    source: str

    def token_s(self, sequences: float) -> float:
        """Seconds in which each of so many sequences gets a token."""
        times = [(number, number / rate) for number, rate in self.points]
        if len(times) == 1:
            return times[0][1] / times[0][0] * sequences
        place = min(max(bisect.bisect_right([number for number, _ in times], sequences), 1), len(times) - 1)
        (low, low_s), (high, high_s) = times[place - 1], times[place]
        slope = max((high_s - low_s) / (high - low), 0.0)
        # A line that falls below nothing would be measurement noise; half of what was seen is as fast as it is taken.
        return max(low_s + slope * (sequences - low), times[0][1] / 2)

    def faster(self, factor: float) -> DecodeCurve:
        """The same engine, so many times as fast."""
        return replace(self, points=tuple((number, rate * factor) for number, rate in self.points))


@dataclass(frozen=True, slots=True)
class EpisodeShape:
    """One episode as a sequence of turns: tokens before and in each reply, seconds of the environment behind it.

    Example: two turns of 40 and 12 tokens, a tool call of 0.3 s in between:
    ``EpisodeShape((200, 60), (40, 12), (0.3, 0.0))``.
    """

    prompt_tokens: tuple[float, ...]
    reply_tokens: tuple[float, ...]
    environment_s: tuple[float, ...]

    @property
    def sampled_tokens(self) -> float:
        """Tokens of all replies."""
        return sum(self.reply_tokens)

    @property
    def num_tokens(self) -> float:
        """Tokens that go through the trainer."""
        return sum(self.prompt_tokens) + sum(self.reply_tokens)


@dataclass(frozen=True, slots=True)
class Shapes:
    """Episodes to draw from, as they were measured or as a distribution gave them."""

    episodes: tuple[EpisodeShape, ...]
    source: str

    def mean(self, values: Sequence[float]) -> float:
        """The mean of one value of each episode."""
        return sum(values) / len(values)

    @property
    def turns(self) -> float:
        """Mean turns of an episode."""
        return self.mean([len(shape.reply_tokens) for shape in self.episodes])

    @property
    def sampled_tokens(self) -> float:
        """Mean tokens of all replies of an episode."""
        return self.mean([shape.sampled_tokens for shape in self.episodes])

    def faster(self, factor: float) -> Shapes:
        """The same episodes in an environment so many times as fast."""
        faster = tuple(
            replace(shape, environment_s=tuple(seconds / factor for seconds in shape.environment_s))
            for shape in self.episodes
        )
        return replace(self, episodes=faster)


@dataclass(frozen=True, slots=True)
class Latencies:
    """What every part takes.

    `scorers` has seconds of one call by the scorer's name. `environment_slots` bounds the steps that an environment
    takes at once, `engine_slots` the sequences of an engine; infinite where nothing does. `ranks` is the number of
    trainer ranks of which the trainer's figures are, and `scaling` how its speed grows with them: ``ranks**scaling``.
    """

    decode: DecodeCurve
    engine_slots: Measured
    request_s: Measured
    """From a request to its first token, beside prefill."""
    prefill_token_s: Measured
    """Seconds of a prompt's token, during which the engine decodes nothing."""
    shapes: Shapes
    environment_start_s: Measured
    environment_score_s: Measured
    environment_slots: Measured
    trainer_fixed_s: Measured
    """Of a step beside its tokens, taking the batch included."""
    trainer_token_s: Measured
    ranks: Measured
    scaling: Measured
    stage_s: Measured
    """From the end of a step until the trainer takes the next batch: it writes its weights."""
    publish_s: Measured
    """From staged weights until engines serve them, pause included, where nothing is in flight."""
    pause_s: Measured
    """That an engine stands still for them, where nothing is in flight."""
    interrupt_s: Measured
    """Of publication and pause beside, for each sequence that it interrupts."""
    dropped_groups: Measured
    """Fraction of the groups that the filter or failures take out."""
    scorers: Mapping[str, Measured] = field(default_factory=dict)

    def table(self) -> Iterator[tuple[str, Measured]]:
        """Every figure by name, for people to read."""
        for point, rate in self.decode.points:
            yield f"decode, {point:g} at once", Measured(rate, "tokens/s", self.decode.source)
        yield "turns of an episode", Measured(self.shapes.turns, "turns", self.shapes.source)
        yield "sampled tokens of an episode", Measured(self.shapes.sampled_tokens, "tokens", self.shapes.source)
        steps = self.shapes.mean([sum(shape.environment_s) for shape in self.shapes.episodes])
        yield "environment steps of an episode", Measured(steps, "s", self.shapes.source)
        for entry in fields(self):
            figure = getattr(self, entry.name)
            if isinstance(figure, Measured):
                yield entry.name.replace("_", " "), figure
        yield from ((f"scorer {name}", figure) for name, figure in self.scorers.items())

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts of the run that may hold it up."""
        return ("engines", "environment", "trainer", "publication", *(f"scorer {name}" for name in self.scorers))

    def with_faster(self, part: str, factor: float) -> Latencies:
        """The same run with one part so many times as fast."""
        if part == "engines":
            return replace(
                self,
                decode=self.decode.faster(factor),
                request_s=self.request_s.faster(factor),
                prefill_token_s=self.prefill_token_s.faster(factor),
            )
        if part == "environment":
            return replace(
                self,
                shapes=self.shapes.faster(factor),
                environment_start_s=self.environment_start_s.faster(factor),
                environment_score_s=self.environment_score_s.faster(factor),
            )
        if part == "trainer":
            return replace(
                self,
                trainer_fixed_s=self.trainer_fixed_s.faster(factor),
                trainer_token_s=self.trainer_token_s.faster(factor),
            )
        if part == "publication":
            return replace(
                self,
                stage_s=self.stage_s.faster(factor),
                publish_s=self.publish_s.faster(factor),
                pause_s=self.pause_s.faster(factor),
                interrupt_s=self.interrupt_s.faster(factor),
            )
        name = part.removeprefix("scorer ")
        return replace(self, scorers={**self.scorers, name: self.scorers[name].faster(factor)})
