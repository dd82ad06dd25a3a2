"""Forks: members of a group that go on from one state of another member instead of being played from the start.

The parent is the first member of the group that is no fork and ended well; the state is drawn by its seed, uniformly
among those behind a turn that the environment answered and that another turn followed: the states, but for the first,
in which the policy acted. Neither looks at a reward, so nothing is selected by the outcome. Since longer parents have
more such states, the parent's own end must not be compared with its forks: these are compared with each other alone.

Parent and state follow from what is on record of the group, so a run that is resumed draws the same again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

from agentrl.types.episode import Episode, Fork


def find_parent(
    episodes: Sequence[Episode], waited_for: Collection[int], num_played: int, num_dispatched: int
) -> tuple[Episode | None, bool]:
    """The parent of a group's forks, and whether it is known by now; none if all members that could be it failed.

    It is the first such member and not the first that ends, which would rather be a short one.

    Args:
        episodes: that ended well.
        waited_for: members in play, to be scored, or to be dispatched again.
        num_played: members that are played from the start.
        num_dispatched: members that were dispatched so far.

    Example: 0 failed for good, 1 plays and 2 ended well: not known yet.
    """
    ended_well = {episode.ticket.member: episode for episode in episodes}
    for member in range(num_played):
        if member in ended_well:
            return ended_well[member], True
        if member in waited_for or member >= num_dispatched:
            return None, False
    return None, True


def draw_fork(parent: Episode) -> Fork | None:
    """The state that all forks of a parent go on from; None if it has none from which to."""
    turns = fork_turns(parent)
    if not turns:
        return None
    seed = parent.ticket.seed
    digest = hashlib.blake2b(f"{seed}/{parent.episode_id}/fork".encode(), digest_size=8).digest()
    return Fork(parent.episode_id, turns[int.from_bytes(digest, "little") % len(turns)], seed)


def fork_turns(parent: Episode) -> list[int]:
    """Turns that the environment answered and another turn followed."""
    # Seconds tell of an answer to a reply without a tool call.
    return [turn.index for turn in parent.turns[:-1] if turn.effects or turn.environment_s > 0]
