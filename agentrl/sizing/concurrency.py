"""How many sequences a run's engines had at once, from the spans that it wrote."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

from agentrl.telemetry.span_files import TRACES, read_spans
from agentrl.telemetry.spans import Span, SpanKind

_EPISODES = "train-"  # those of evaluations have engines of their own


def sequences_at_once(run: Path) -> float | None:
    """Sequences that were generated at once, on average over what replies took, by a run that was started once.

    A mean over the clock has the moments in which engines rest, and says less of what a token took. Behind the last
    episode that was traced others may run unseen, so that nothing counts from its start on. None without such spans.

    Example: a reply alone for 1 s, then two for 1 s: of 3 s of replies 1 went with one and 2 with two, 1.67 on average.
    """
    folder = run / TRACES
    if len(list(folder.glob("run.*.jsonl"))) != 1:
        return None
    spans = [span for _, span in read_spans(folder) if span.trace.startswith(_EPISODES)]
    starts: dict[str, float] = {}
    for span in spans:
        starts[span.trace] = min(span.start_s, starts.get(span.trace, span.start_s))
    replies = [span for span in spans if span.kind is SpanKind.GENERATION]
    return _mean_over_replies(replies, max(starts.values(), default=0.0))


def _mean_over_replies(replies: Iterable[Span], until_s: float) -> float | None:
    edges = [(span.start_s, 1) for span in replies] + [(span.end_s, -1) for span in replies]
    number, of_replies_s, sum_s = 0, 0.0, 0.0
    for (since_s, change), (next_s, _) in itertools.pairwise(sorted(edges)):
        number += change
        lasted_s = max(min(next_s, until_s) - since_s, 0.0)
        of_replies_s += number * lasted_s
        sum_s += number * number * lasted_s
    return sum_s / of_replies_s if of_replies_s else None
