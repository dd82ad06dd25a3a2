"""Policy versions: the one clock of a run, and the spans of tokens that each version wrote."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class PolicyVersion:
    """Which weights: an epoch and the number of steps, each over one batch, that they contain.

    The first weights are step 0; a batch makes v+1 of v, in one optimizer step or in several. The epoch rises
    when a resumed run may differ from what it lost, so that tokens of the lost weights never pass for tokens of
    the new.

    Example: ``PolicyVersion(0, 17)`` prints as ``0.17`` and is older than ``PolicyVersion(1, 3)``.
    """

    epoch: int
    step: int

    def next(self) -> PolicyVersion:
        """The version that one batch makes of this one."""
        return PolicyVersion(self.epoch, self.step + 1)

    def steps_since(self, older: PolicyVersion) -> int:
        """Steps between `older` and this version: the staleness of what `older` wrote.

        Raises:
            ValueError: `older` is in fact newer, which means that a version counter went backwards.
        """
        if self.step < older.step:
            raise ValueError(f"version {older} is newer than {self}: a version counter went backwards")
        return self.step - older.step

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Read what ``str`` wrote.

        Raises:
            ValueError: the text is not of the form ``epoch.step``.
        """
        epoch, dot, step = text.partition(".")
        if not (dot and epoch.isdigit() and step.isdigit()):
            raise ValueError(f"{text!r} is not a policy version; expected epoch.step, such as 0.17")
        return cls(int(epoch), int(step))


FIRST_VERSION = PolicyVersion(0, 0)
"""Of the weights that a policy begins with."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Sampled tokens ``[start, end)`` of one node that one version wrote.

    Example: 120 tokens interrupted by a publish at token 40 carry
    ``(VersionSpan(v7, 0, 40), VersionSpan(v8, 40, 120))``.
    """

    version: PolicyVersion
    start: int
    end: int


def append_spans(spans: Sequence[VersionSpan], more: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Put `more` (counted from 0) behind `spans`, joining neighbours of one version."""
    joined = list(spans)
    offset = joined[-1].end if joined else 0
    for span in more:
        start, end = span.start + offset, span.end + offset
        if joined and joined[-1].version == span.version and joined[-1].end == start:
            joined[-1] = VersionSpan(span.version, joined[-1].start, end)
        else:
            joined.append(VersionSpan(span.version, start, end))
    return tuple(joined)


def spans_tile(spans: Sequence[VersionSpan], num_tokens: int) -> bool:
    """Whether the spans cover ``[0, num_tokens)`` in order, without gap, overlap or empty span."""
    at = 0
    for span in spans:
        if span.start != at or span.end <= span.start:
            return False
        at = span.end
    return at == num_tokens
