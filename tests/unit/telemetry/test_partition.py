"""What an episode was doing, against a reference that looks at every moment by itself."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from agentrl.telemetry.partition import Doing, partition
from agentrl.telemetry.spans import Span, SpanKind

FIRST_WINS = ["generation", "waiting_for_weights", "environment", "scoring"]
KINDS = st.sampled_from([SpanKind(name) for name in (*FIRST_WINS, "queue", "turn", "episode")])


def span(kind: SpanKind, start_s: float, end_s: float) -> Span:
    return Span(kind, str(kind), start_s, end_s, "e", "0" * 16)


def test_the_example_of_the_docstring():
    spans = [span(SpanKind.GENERATION, 1, 4), span(SpanKind.ENVIRONMENT, 2, 6)]
    assert partition(0, 6, spans) == [
        Doing(SpanKind.QUEUE, 0, 1),
        Doing(SpanKind.GENERATION, 1, 4),
        Doing(SpanKind.ENVIRONMENT, 4, 6),
    ]


@given(
    st.integers(0, 5),
    st.integers(1, 20),
    st.lists(st.tuples(KINDS, st.integers(-3, 25), st.integers(0, 12)), max_size=12),
)
def test_at_every_moment_the_first_that_goes_on_counts_and_stretches_tile(start: int, length: int, drawn: list) -> None:
    end = start + length
    spans = [span(kind, at, at + duration) for kind, at, duration in drawn]
    found = partition(start, end, spans)
    expected = []
    for moment in range(start, end):
        on = {str(s.kind) for s in spans if s.start_s <= moment and s.end_s >= moment + 1}
        expected.append(next((name for name in FIRST_WINS if name in on), "queue"))
    assert [str(d.kind) for d in found for _ in range(int(d.end_s - d.start_s))] == expected
    assert [d.start_s for d in found] + [end] == [start] + [d.end_s for d in found]
    assert all(one.kind is not other.kind for one, other in pairwise(found))
