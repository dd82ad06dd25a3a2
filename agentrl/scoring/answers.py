"""Which answer belongs to which turn: a score joins the turn that it names, once, or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agentrl.types.errors import Boundary, EpisodeError, Failure
from agentrl.types.turn_score import ScoredTurn, TurnKey, TurnScore, check_turn_score


def matched(turns: Sequence[ScoredTurn], answers: Sequence[TurnScore], counts: Counter[str]) -> list[TurnScore]:
    """One score for each turn, in their order, whatever the order of the answers; a failure where there is none.

    Answers of turns that were not asked for are counted as ``stray``, a second answer of a turn as ``repeated``;
    neither is used. A batch whose answers are of several versions was changed in its midst, and nobody knows which
    weights said what: all of it fails, counted as ``mixed``.
    """
    asked = {turn.key for turn in turns}
    found: dict[TurnKey, TurnScore] = {}
    for answer in answers:
        if answer.key not in asked:
            counts["stray"] += 1
        elif answer.key in found:
            counts["repeated"] += 1
        else:
            found[answer.key] = answer
    scores = [_checked(turn, found.get(turn.key)) for turn in turns]
    versions = sorted({score.version for score in scores if score.failure is None})
    if len(versions) > 1:
        counts["mixed"] += len(turns)
        failure = Failure(Boundary.SCORER, "version", f"one batch was answered by the versions {', '.join(versions)}")
        return [TurnScore(turn.key, "", failure=failure) for turn in turns]
    return scores


def _checked(turn: ScoredTurn, answer: TurnScore | None) -> TurnScore:
    if answer is None:
        return TurnScore(turn.key, "", failure=Failure(Boundary.SCORER, "missing", f"no answer for {turn.key}"))
    try:
        return check_turn_score(turn, answer)
    except EpisodeError as error:
        return TurnScore(turn.key, "", failure=error.failure)
