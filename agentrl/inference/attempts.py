"""What one request has been through: which engines failed it, and when it may ask one of them again."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from enum import StrEnum

from agentrl.inference.fleet import Member
from agentrl.types.errors import EpisodeError

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


class Cause(StrEnum):
    """Why a request was sent again.

    DROPPED: the engine gave no answer, or an answer was lost on its way. FENCED: the answer names weights that nobody
    has proven. MISDELIVERED: it was for another request. BUSY: the engine asked for the request later.
    """

    DROPPED = "dropped"
    FENCED = "fenced"
    MISDELIVERED = "misdelivered"
    BUSY = "busy"


class Attempts:
    """The attempts of one request to be answered.

    An engine that the request has not asked yet may be asked at any time. One that failed it may be asked again after
    a pause, which grows with every failure, or as soon as it has proven its weights anew; and no longer than `wait_s`
    after the first failure.

    Example: over a lone engine that drops every connection, with `wait_s` 1, a request is sent at about 0, 0.1, 0.3
    and 0.7 s, and fails at 1 s.
    """

    def __init__(self, wait_s: float) -> None:
        self.last: EpisodeError | None = None
        self.causes: Counter[Cause] = Counter()
        self.not_before_s = 0.0
        self._wait_s = wait_s
        self._deadline_s: float | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._asked: set[str] = set()
        self._failed: dict[str, tuple[int, float]] = {}

    @property
    def num_failed(self) -> int:
        """Attempts for which an engine may have drawn tokens in vain."""
        return self.causes.total() - self.causes[Cause.BUSY]

    @property
    def deadline_s(self) -> float:
        """Time of the loop from which on no engine is asked twice."""
        return self._now() + self._wait_s if self._deadline_s is None else self._deadline_s

    def rid(self, rid: str) -> str:
        """A request id of this attempt alone: what an attempt left in an engine is not what the next one waits for.

        All have one length, since SGLang takes an abort for all requests whose ids begin like the one that it names.
        """
        if not self.causes:
            return rid
        return hashlib.blake2b(f"{rid}/{self.causes.total()}".encode(), digest_size=16).hexdigest()

    def failed(self, member: Member, cause: Cause, error: EpisodeError) -> None:
        """An attempt at an engine has ended without an answer that counts."""
        now = self._now()
        self.last = error
        self.causes[cause] += 1
        self._asked.add(member.name)
        if self._deadline_s is None:
            self._deadline_s = now + self._wait_s
        if cause is Cause.BUSY:
            return
        self._failed[member.name] = (member.proofs, now)
        self.not_before_s = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def is_new(self, member: Member) -> bool:
        """Whether the engine has not failed this request, or has proven its weights since."""
        if member.name not in self._asked:
            return True
        proofs, _ = self._failed.get(member.name, (None, 0.0))
        return proofs != member.proofs and not self.is_over

    @property
    def may_repeat(self) -> bool:
        """Whether engines that failed this request may be asked again now."""
        return self._now() >= self.not_before_s and not self.is_over

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self._now() >= self.deadline_s

    def failed_at_s(self, member: Member) -> float:
        """When the engine last failed this request."""
        return self._failed[member.name][1]

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
