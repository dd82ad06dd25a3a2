"""What an episode needs behind its play: each score is on record, and it is over when it has all that it needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.buffer.step_journal import StepJournal
from agentrl.scorers.function import FunctionScorer
from agentrl.scoring.tier import ScoringTier
from agentrl.telemetry.run_traces import RunTraces
from agentrl.telemetry.spans import SpanKind
from agentrl.types.environment import ScoreRecord
from agentrl.types.episode import Episode
from agentrl.types.errors import EpisodeError
from agentrl.types.score import with_scores


@dataclass(frozen=True, slots=True)
class LateScorer:
    """A scorer of finished episodes; one `may_be_missing` whose failure leaves the reward to the others."""

    scorer: FunctionScorer
    may_be_missing: bool


class Scoring:
    """Has episodes judged that were played to their end, by all of their scorers at once.

    Those with a weight make the reward, and an episode is over when it has theirs. The others, of weight 0, only
    record: nothing waits for them. The `tier` judges turns, and began while the episode was played. `counts` has scores
    and failures by scorer.
    """

    def __init__(
        self,
        scorers: Mapping[str, Sequence[LateScorer]],
        journal: StepJournal,
        tier: ScoringTier | None = None,
        traces: RunTraces | None = None,
    ) -> None:
        self._scorers, self._journal, self.tier = dict(scorers), journal, tier
        self._traces = traces or RunTraces()
        self.counts: dict[str, float] = {}

    async def room(self) -> None:
        """Waits for: scorers of turns to lag behind by less than they may. Unblocked by: these, or deadlines."""
        if self.tier is not None:
            await self.tier.room()

    def metrics(self) -> dict[str, float]:
        """What was counted of all scorers since the run's process began."""
        return {**self.counts, **(self.tier.metrics() if self.tier is not None else {})}

    async def complete(self, episode: Episode) -> Episode:
        """The episode with all scores that it needs; one that failed gets none.

        Waits for: its scorers. Unblocked by: their ends, or their deadlines. Raises StorageError or StalledError.
        """
        judged = await self._judge(episode, lambda scorer: scorer.weight != 0)
        return judged if self.tier is None else await self.tier.complete(judged, is_required=True)

    async def add_recorded(self, episode: Episode) -> Episode:
        """The episode with the scores that only record, too; nobody is asked about it any more.

        Waits for: its scorers. Unblocked by: their ends, or their deadlines. Raises StorageError or StalledError.
        """
        judged = await self._judge(episode, lambda scorer: scorer.weight == 0)
        if self.tier is None:
            return judged
        judged = await self.tier.complete(judged, is_required=False)
        self.tier.forget(episode.episode_id)
        return judged

    async def _judge(self, episode: Episode, is_asked: Callable[[FunctionScorer], bool]) -> Episode:
        known = {record.scorer for record in episode.scores}
        of_environment = self._scorers[episode.ticket.environment]
        wanted = [late for late in of_environment if is_asked(late.scorer) and late.scorer.name not in known]
        if episode.failure is not None or not wanted:
            return episode
        records = await asyncio.gather(*(self._score(late, episode) for late in wanted))
        return with_scores(episode, [*episode.scores, *records])

    async def _score(self, late: LateScorer, episode: Episode) -> ScoreRecord:
        scorer = late.scorer
        try:
            with self._traces.of(episode.episode_id).during(SpanKind.SCORING, f"score.{scorer.name}"):
                record = ScoreRecord(scorer.name, await scorer.score(episode), scorer.weight)
        except EpisodeError as error:
            weight = 0.0 if late.may_be_missing else scorer.weight
            record = ScoreRecord(scorer.name, None, weight, error.failure)
        outcome = "failed" if record.failure is not None else "scored"
        name = f"scorer/{scorer.name}/{outcome}_episodes"
        self.counts[name] = self.counts.get(name, 0.0) + 1
        await self._journal.scored(episode.episode_id, record)
        return record
