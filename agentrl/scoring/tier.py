"""The tier of a run: who is asked about which turn, and what becomes of an episode whose scores are late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.buffer.step_journal import StepJournal
from agentrl.scorers.combined import CombinedConfig, combine
from agentrl.scorers.definition import TurnScorerConfig
from agentrl.scoring.feed import TurnFeed
from agentrl.scoring.queue import ScorerQueue
from agentrl.scoring.trends import ScoreTrends
from agentrl.types.environment import Score, ScoreRecord
from agentrl.types.episode import Episode, Ticket
from agentrl.types.errors import Boundary, Failure, StalledError
from agentrl.types.rollout import TurnPlayed
from agentrl.types.score import scored_turns, with_scores
from agentrl.types.turn_score import ScoredTurn, TurnKey, TurnScore

Known = dict[str, dict[str, dict[TurnKey, TurnScore]]]
"""Scores by episode, scorer and turn."""
_ASK_AGAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Judges:
    """The scorers of turns of one environment: those that are asked, those made of their scores, in order.

    `required` names all scorers that a reward or the credit of a policy needs; the others only record.
    """

    queues: Sequence[ScorerQueue]
    combined: Sequence[CombinedConfig]
    required: frozenset[str]


class ScoringTier:
    """Has the turns of episodes judged while they are played, by the scorers of their environments.

    `judges` are by environment. `known` is what a run that goes on has on record of the episodes in flight: such turns
    are not asked about.
    """

    def __init__(
        self,
        judges: Mapping[str, Judges],
        feed: TurnFeed,
        journal: StepJournal,
        known: Known,
    ) -> None:
        self._judges, self._feed, self._journal = dict(judges), feed, journal
        self._known = dict(known)
        self._asked: dict[str, dict[str, dict[TurnKey, asyncio.Future[TurnScore]]]] = {}
        configs = [s for j in judges.values() for s in (*(queue.config for queue in j.queues), *j.combined)]
        self._trends = {config.name: ScoreTrends(config) for config in configs}
        self._held_admission_s = 0.0

    def played(self, ticket: Ticket, event: TurnPlayed) -> None:
        """A turn is on record: ask about it while the episode goes on."""
        queues = self._judges[ticket.environment].queues
        turn = self._feed.add(ticket, event) if queues else None
        if turn is not None:
            for queue in queues:
                self._ask(queue, turn)

    async def room(self) -> None:
        """Waits for: every line to be shorter than its bound. Unblocked by: scorers, or deadlines of episodes."""
        started = time.monotonic()
        for queue in self._all():
            await queue.room()
        self._held_admission_s += time.monotonic() - started

    async def open(self) -> None:
        """Have the first workers of all scorers. Raises ConfigError or EpisodeError."""
        queues = list(self._all())
        outcomes = await asyncio.gather(*(queue.open() for queue in queues), return_exceptions=True)
        if failure := next((outcome for outcome in outcomes if outcome is not None), None):
            await asyncio.gather(*(queue.close() for queue in queues))
            raise failure

    async def run(self) -> None:
        """Waits for: turns. Ends by cancellation. Raises StorageError, ConfigError."""
        async with asyncio.TaskGroup() as lines:
            for queue in self._all():
                lines.create_task(queue.run(), name=f"score-{queue.config.name}")

    async def complete(self, episode: Episode, is_required: bool) -> Episode:
        """The episode with all that scorers of turns say of it: those that are required, or those that only record.

        Waits for: scores. Unblocked by: these, or the deadline of each scorer.

        Raises:
            StalledError: a scorer that is waited for has not judged it within its patience.
            AgentRLError: what scorers say has parted from the outcome, and a recipe stops on that.
            StorageError: the journal cannot be written.
        """
        self._feed.forget(episode.episode_id)
        judges, known = self._judges[episode.ticket.environment], {record.scorer for record in episode.scores}

        def is_wanted(config: TurnScorerConfig) -> bool:
            return config.name not in known and (config.name in judges.required) == is_required

        queues = [queue for queue in judges.queues if is_wanted(queue.config)]
        combined = [config for config in judges.combined if is_wanted(config)]
        if episode.failure is not None or not (queues or combined):
            return episode
        on_record = self._known.setdefault(episode.episode_id, {})
        for name, scores in episode.turn_scores.items():
            on_record.setdefault(name, {}).update((score.key, score) for score in scores)
        found = await asyncio.gather(*(self._complete(queue, episode) for queue in queues))
        given = {queue.config.name: scores for queue, (scores, _) in zip(queues, found, strict=True) if scores}
        judged = with_scores(episode, [*episode.scores, *(record for _, record in found)])
        judged = replace(judged, turn_scores={**episode.turn_scores, **given})
        for config in combined:
            judged = await self._combine(config, judged)
        for name in [config.name for config in (*(queue.config for queue in queues), *combined)]:
            self._trends[name].add(judged.turn_scores.get(name, ()), judged.reward)
        return judged

    def forget(self, episode_id: str) -> None:
        """The episode needs no scores any more, or not now."""
        self._feed.forget(episode_id)
        self._known.pop(episode_id, None)
        asked = self._asked.pop(episode_id, {})
        for queue in self._all():
            queue.forget(list(asked.get(queue.config.name, ())))

    def metrics(self) -> dict[str, float]:
        """What is counted of all scorers."""
        found: dict[str, float] = {"scorer/held_admission_s": self._held_admission_s} if self._trends else {}
        for queue in self._all():
            found |= queue.metrics()
        for trends in self._trends.values():
            found |= trends.metrics()
        return found

    def _all(self) -> Iterable[ScorerQueue]:
        return dict.fromkeys(queue for judges in self._judges.values() for queue in judges.queues)

    async def _combine(self, config: CombinedConfig, episode: Episode) -> Episode:
        """The episode with a score that is made of others. Raises StorageError."""
        scores, failure = combine(config, episode), None
        if scores is None:
            failure = Failure(Boundary.SCORER, "parts", f"a part of {config.name} was not scored, or failed")
        failure = failure or next((score.failure for score in scores or () if score.failure is not None), None)
        whole = tuple(score for score in scores or () if score.failure is None)
        await self._journal.turns_scored(config.name, whole)
        record = await self._record(config, episode.episode_id, whole, failure)
        judged = with_scores(episode, [*episode.scores, record])
        return replace(judged, turn_scores={**judged.turn_scores, config.name: whole})

    def _ask(self, queue: ScorerQueue, turn: ScoredTurn) -> None:
        """Ask about a turn unless its score is known, or the scorer is not for its policy."""
        config, name = queue.config, turn.key.episode_id
        if turn.key in self._known.get(name, {}).get(config.name, {}):
            return
        if config.policies and turn.policy not in config.policies:
            return
        asked = self._asked.setdefault(name, {}).setdefault(config.name, {})
        if turn.key not in asked:
            asked[turn.key] = queue.ask(turn)

    async def _complete(self, queue: ScorerQueue, episode: Episode) -> tuple[tuple[TurnScore, ...], ScoreRecord]:
        """One scorer's scores of an episode, and its record."""
        config, name = queue.config, episode.episode_id
        turns = [turn for turn in scored_turns(episode) if not config.policies or turn.policy in config.policies]
        keys = [turn.key for turn in turns]
        for turn in turns:
            self._ask(queue, turn)
        del turns
        given = await self._given(queue, episode, keys)
        queue.forget(keys)
        given = {key: given[key] for key in keys if key in given}
        failure = next((score.failure for score in given.values() if score.failure is not None), None)
        if len(given) < len(keys):
            queue.counts.totals["deadline_misses"] += 1
            message = f"{len(keys) - len(given)} of {len(keys)} turns of {name} were not scored in time"
            failure = Failure(Boundary.TIMEOUT, f"scorer.{config.name}", message)
        scores = tuple(score for score in given.values() if score.failure is None)
        return scores, await self._record(config, name, scores, failure)

    async def _given(self, queue: ScorerQueue, episode: Episode, keys: Sequence[TurnKey]) -> dict[TurnKey, TurnScore]:
        """The scores that are there at the scorer's deadline; under ``wait`` all of them.

        Waits for: the scorer. Unblocked by: its scores, or the deadline. Raises StalledError.
        """
        config, name = queue.config, episode.episode_id
        ends = time.monotonic() + (config.patience_s if config.late == "wait" else config.deadline_s)
        known = dict(self._known.get(name, {}).get(config.name, {}))
        while True:
            # A turn that was lost with its worker may have been asked about too, and nobody waits for that.
            asked = {key: f for key, f in self._asked.get(name, {}).get(config.name, {}).items() if key in keys}
            if asked:
                await asyncio.wait(asked.values(), timeout=max(ends - time.monotonic(), 0.0))
            done = {key: f.result() for key, f in asked.items() if f.done() and not f.cancelled()}
            lacking = [key for key in keys if key not in known and (key not in done or done[key].failure is not None)]
            if config.late != "wait" or not lacking:
                return known | done
            if time.monotonic() > ends:
                reason = next((done[key].failure for key in lacking if key in done), None) or "no answer"
                raise StalledError(
                    f"scorer '{config.name}' has not judged {len(lacking)} turns of {name} within patience_s = "
                    f"{config.patience_s:g} ({reason}): mend it and resume the run, or set late to drop or outcome_only"
                )
            await self._ask_again(queue, episode, set(lacking) & done.keys())

    async def _ask_again(self, queue: ScorerQueue, episode: Episode, keys: set[TurnKey]) -> None:
        """Ask once more about turns that the scorer failed to judge and that are waited for, after a while."""
        await asyncio.sleep(_ASK_AGAIN_S)
        queue.counts.totals["asked_again"] += len(keys)
        asked = self._asked[episode.episode_id][queue.config.name]
        for turn in (turn for turn in scored_turns(episode) if turn.key in keys):
            asked[turn.key] = queue.ask(turn)

    async def _record(
        self, config: TurnScorerConfig, name: str, scores: Sequence[TurnScore], failure: Failure | None
    ) -> ScoreRecord:
        """What the scorer's turns come to for the episode as a whole, on record."""
        if failure is not None:
            # A scorer of any weight that failed is the episode's failure; one of none is only missed.
            record = ScoreRecord(config.name, None, (config.weight or 1.0) if config.late == "drop" else 0.0, failure)
        else:
            values = [score.value for score in scores if score.value is not None]
            mean = sum(values) / len(values) if values else None
            record = ScoreRecord(config.name, Score(mean, {"turns": float(len(scores))}), config.weight)
        await self._journal.scored(name, record)
        return record
