"""One run on the virtual clock: admission, episodes, scores, steps, publications.

Admission, the order of groups and the rule of ``wait`` are the buffer's. What is simplified: environments of a policy
count as one; forks are played from their start; nothing fails but whole
groups, at their end; evaluations, checkpoints and what processes of one machine take from each other cost nothing.
"""

from __future__ import annotations

import functools
import random
from collections import Counter, deque
from dataclasses import dataclass, field

from agentrl.buffer.admission import admissible
from agentrl.buffer.order import in_window
from agentrl.buffer.staleness import wait_permits
from agentrl.sizing.clock import Clock
from agentrl.sizing.engine import Reply, SimulatedEngine
from agentrl.sizing.latencies import EpisodeShape, Latencies
from agentrl.sizing.outcome import Admission, Outcome, Step, summarise
from agentrl.sizing.servers import Servers
from agentrl.sizing.setup import Setup
from agentrl.types.errors import ConfigError


@dataclass(slots=True)
class _Group:
    """Episodes of one task. `missing` counts members that are not over, `undispatched` those that have not begun."""

    number: int
    started: int
    undispatched: int
    missing: int
    is_dropped: bool
    episodes: list[_Playing] = field(default_factory=list)


@dataclass(slots=True)
class _Playing:
    """An episode under way; `unscored` counts answers that it still waits for once it has been played."""

    group: _Group
    shape: EpisodeShape
    engine: SimulatedEngine
    spans: list[tuple[int, float]] = field(default_factory=list)
    turn: int = 0
    unscored: int = 1  # the verdict itself


class Simulation:
    """The run of a setup with these latencies; the same seed draws the same episodes for the same groups."""

    def __init__(self, setup: Setup, latencies: Latencies, seed: int = 0) -> None:
        self.setup, self.latencies, self._seed = setup, latencies, seed
        self.clock = Clock()
        self.engines = [SimulatedEngine(self.clock, latencies) for _ in range(setup.engines)]
        self.environment = Servers(self.clock, latencies.environment_slots.value)
        self.scorers = {name: Servers(self.clock, s.slots, s.batch) for name, s in setup.scorers.items()}
        self.version = self.loaded = 0
        self.running = self.accepted = 0
        self.steps: list[Step] = []
        self.admissions: list[Admission] = []
        self.trainer_busy_s = self.publishing_s = 0.0
        self._groups: dict[int, _Group] = {}
        self._opening: deque[_Group] = deque()
        self._ready: dict[int, _Group] = {}
        self._num_groups = 0
        self._trains = self._publishes = False
        self._waits_from, self._running_from, self._running_area = 0.0, 0.0, 0.0
        self._num_pauses = 0

    def run(self, steps: int) -> Outcome:
        """Make so many steps. Raises ConfigError where the run would stand still."""
        self._admit()
        if not self.clock.run(lambda: len(self.steps) >= steps):
            raise ConfigError(
                f"the run stands still after step {self.version}: {self.running} episodes run, {len(self._ready)} "
                f"groups of {self.setup.groups_per_step} are ready, and none may begin; raise buffer.max_staleness, or "
                "buffer.order_window"
            )
        self._count_running()
        return summarise(self)

    @property
    def mean_running(self) -> float:
        """Episodes that held a place, on average."""
        return self._running_area / self.clock.now

    def _admit(self) -> None:
        setup = self.setup
        while True:
            free = admissible(
                setup.places, self.running, self.accepted, self.loaded, setup.episodes_per_step, setup.max_staleness
            )
            if free <= 0:
                return
            for _ in range(free):
                self._begin()

    def _begin(self) -> None:
        """Dispatch a member of the oldest group that lacks one, or the first of a new group."""
        if not self._opening:
            chance = random.Random(f"{self._seed}/{self._num_groups}").random()
            size, dropped = self.setup.group_size, chance < self.latencies.dropped_groups.value
            group = _Group(self._num_groups, self.loaded, size, size, dropped)
            self._groups[group.number] = group
            self._opening.append(group)
            self._num_groups += 1
        group = self._opening[0]
        member = self.setup.group_size - group.undispatched
        group.undispatched -= 1
        if not group.undispatched:
            self._opening.popleft()
        self._count_running()
        self.running += 1
        self.admissions.append(Admission(self.running, self.accepted, self.loaded))
        draw = random.Random(f"{self._seed}/{group.number}/{member}")
        shape = draw.choice(self.latencies.shapes.episodes)
        engine = min(self.engines, key=lambda candidate: candidate.load)
        engine.load += 1  # its place in the balance, also between its turns
        episode = _Playing(group, shape, engine)
        self.environment.ask(self.latencies.environment_start_s.value, lambda: self._generate(episode))

    def _generate(self, episode: _Playing) -> None:
        shape, turn = episode.shape, episode.turn
        prompt, tokens = shape.prompt_tokens[turn], shape.reply_tokens[turn]
        reply = Reply(prompt, tokens, lambda: self._replied(episode), episode.spans)
        self.clock.after(self.latencies.request_s.value, lambda: episode.engine.begin(reply))

    def _replied(self, episode: _Playing) -> None:
        turn, is_last = episode.turn, episode.turn + 1 == len(episode.shape.reply_tokens)
        episode.turn += 1
        for name, scorer in self.setup.scorers.items():
            if scorer.of_turns or is_last:
                episode.unscored += 1
                self.scorers[name].ask(self.latencies.scorers[name].value, lambda: self._scored(episode))
        behind = self._played if is_last else self._generate
        self.environment.ask(episode.shape.environment_s[turn], lambda: behind(episode))

    def _played(self, episode: _Playing) -> None:
        """The episode generates no more: its place is given back, and the verdict comes."""
        self._count_running()
        self.running -= 1
        self.accepted += 1
        episode.engine.load -= 1
        self.environment.ask(self.latencies.environment_score_s.value, lambda: self._scored(episode))
        self._admit()

    def _scored(self, episode: _Playing) -> None:
        episode.unscored -= 1
        if episode.unscored or episode.turn < len(episode.shape.reply_tokens):
            return
        group = episode.group
        group.episodes.append(episode)
        group.missing -= 1
        if group.missing:
            return
        del self._groups[group.number]
        if group.is_dropped:
            self.accepted -= self.setup.group_size
            self._admit()
        else:
            self._ready[group.number] = group
        self._take()

    def _take(self) -> None:
        """Begin a step if the trainer is idle and groups are ready that may go."""
        if self._trains or not (groups := self._next_groups()):
            return
        for group in groups:
            del self._ready[group.number]
        self._trains = True
        episodes = [episode for group in groups for episode in group.episodes]
        tokens = sum(episode.shape.num_tokens for episode in episodes)
        speed = (self.setup.ranks / self.latencies.ranks.value) ** self.latencies.scaling.value
        seconds = self.latencies.trainer_fixed_s.value
        seconds += self.setup.passes * self.latencies.trainer_token_s.value * tokens / speed
        self.trainer_busy_s += seconds
        stale = dict[int, float]()
        for version, written in (span for episode in episodes for span in episode.spans):
            stale[self.version - version] = stale.get(self.version - version, 0.0) + written
        waited_s = self.clock.now - self._waits_from
        if self.setup.colocated:
            self._pause()
        self.clock.after(seconds, functools.partial(self._trained, waited_s, stale))

    def _next_groups(self) -> list[_Group]:
        setup = self.setup
        starts = {number: group.started for number, group in self._ready.items()}
        may_go = in_window(starts, self._groups, setup.order_window)[: setup.groups_per_step]
        if len(may_go) < setup.groups_per_step:
            return []
        if setup.staleness == "wait":
            left = Counter[int]()
            for group in (*self._groups.values(), *self._ready.values()):
                left[group.started] += setup.group_size if group.number not in may_go else 0
            if not wait_permits(left, self.version, setup.max_staleness, setup.episodes_per_step):
                return []
        return [self._ready[number] for number in may_go]

    def _trained(self, waited_s: float, stale: dict[int, float]) -> None:
        self.version += 1
        if self.setup.colocated:
            self._resume(self.loaded)
        self.clock.after(self.latencies.stage_s.value, lambda: self._staged(waited_s, stale))

    def _staged(self, waited_s: float, stale: dict[int, float]) -> None:
        self.steps.append(Step(self.clock.now, waited_s, stale))
        self._trains, self._waits_from = False, self.clock.now
        self._publish()
        self._take()

    def _publish(self) -> None:
        """Bring the newest staged version to the engines; one that is staged meanwhile comes behind it."""
        if self._publishes or self.loaded == self.version:
            return
        self._publishes, version = True, self.version
        beside_s = max(self.latencies.publish_s.value - self.latencies.pause_s.value, 0.0)
        self.publishing_s += beside_s
        self.clock.after(beside_s, lambda: self._swap(version))

    def _swap(self, version: int) -> None:
        """Stand still for as long as the swap takes, and the abort of the engine that has most in flight."""
        interrupted = max(engine.num_running for engine in self.engines)
        pause_s = self.latencies.pause_s.value + interrupted * self.latencies.interrupt_s.value
        self.publishing_s += pause_s
        self._pause()
        self.clock.after(pause_s, lambda: self._published(version))

    def _published(self, version: int) -> None:
        self._publishes = False
        self.loaded = version
        self._resume(version)
        self._admit()
        self._publish()
        self._take()

    def _pause(self) -> None:
        """Stand still, for the trainer or for a publication, or both at once."""
        self._num_pauses += 1
        for engine in self.engines:
            engine.pause()

    def _resume(self, version: int) -> None:
        self._num_pauses -= 1
        for engine in self.engines if not self._num_pauses else ():
            engine.resume(version)

    def _count_running(self) -> None:
        self._running_area += self.running * (self.clock.now - self._running_from)
        self._running_from = self.clock.now


def simulate(setup: Setup, latencies: Latencies, steps: int, seed: int = 0) -> Outcome:
    """So many steps of a run. Raises ConfigError where it would stand still, or a scorer has no latency."""
    if missing := sorted(setup.scorers.keys() - latencies.scorers.keys()):
        raise ConfigError(
            f"nothing says how long scorer '{missing[0]}' takes: give --set scorers.{missing[0]}.call_s=SECONDS"
        )
    return Simulation(setup, latencies, seed).run(steps)
