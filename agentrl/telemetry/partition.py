"""What an episode was doing at every moment: exactly one of five things.

Spans of one episode overlap: a program runs in the sandbox while its call is generated, a turn is judged while the
next one is drawn. At such a moment the episode does the first of these that goes on:

- `generation`: an engine was asked for a reply, its own line, routing and requests that were sent again included;
- `waiting_for_weights`: every engine that was asked stood still for new weights, was held back for them, or had its
  proof of them under way. So it lasts from the abort of a reply to when its engine resumes;
- `environment`: a call into the environment, to start, act, run a program or be freed;
- `scoring`: somebody judges the episode, or it waits in a scorer's line, **and nothing above goes on**;
- `queue`: none of these. It waits for a worker, for an environment to be there, for the disk that has to have its
  turn, or for its turn on the worker's processor; what the scaffold itself computes counts here too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from agentrl.telemetry.spans import Span, SpanKind

ORDER = (SpanKind.GENERATION, SpanKind.WEIGHTS, SpanKind.ENVIRONMENT, SpanKind.SCORING, SpanKind.QUEUE)
"""What an episode can be doing; at every moment the first that goes on counts."""


@dataclass(frozen=True, slots=True)
class Doing:
    """A stretch in which an episode did one thing; Unix seconds."""

    kind: SpanKind
    start_s: float
    end_s: float


def partition(start_s: float, end_s: float, spans: Iterable[Span]) -> list[Doing]:
    """Stretches that tile an episode from its start to its end, one behind the other, neighbours of different kinds.

    Example: generation from 1 to 4 and a program in the sandbox from 2 to 6, of an episode from 0 to 6: queue to 1,
    generation to 4, environment to 6.
    """
    changes: list[tuple[float, int, SpanKind]] = []
    for span in spans:
        begun_s, over_s = max(span.start_s, start_s), min(span.end_s, end_s)
        if span.kind in ORDER[:-1] and begun_s < over_s:
            changes += [(begun_s, 1, span.kind), (over_s, -1, span.kind)]
    changes.sort(key=lambda change: change[0])
    found: list[Doing] = []
    going_on: Counter[SpanKind] = Counter()
    at_s = start_s
    for moment_s, change, kind in [*changes, (end_s, 0, SpanKind.QUEUE)]:
        if moment_s > at_s:
            _add(found, next((k for k in ORDER if going_on[k]), SpanKind.QUEUE), at_s, moment_s)
            at_s = moment_s
        going_on[kind] += change
    return found


def _add(found: list[Doing], kind: SpanKind, start_s: float, end_s: float) -> None:
    if found and found[-1].kind is kind:
        start_s = found.pop().start_s
    found.append(Doing(kind, start_s, end_s))
