"""How many episodes may start: AReaL's bound (arXiv 2505.24298, sec. 4.1) over our states."""

from __future__ import annotations


def admissible(
    places: int, running: int, accepted: int, loaded_step: int, episodes_per_step: int, max_staleness: float
) -> int:
    """Episodes that may start now: min(C - running, (S + v + 1) * B - (accepted + running)), at least 0.

    Args:
        places: C, episodes that may generate at once.
        running: episodes that hold a place, parked ones too.
        accepted: episodes that gave their place back and are part of a step or may yet be: trained,
            taken, ready, withheld, waiting for a score or for their group, and those that failed for
            good in a group that a step can still take, since steps take groups.
        loaded_step: v, the step of the weights that engines serve.
        episodes_per_step: B.
        max_staleness: S; infinite leaves C alone as the bound.

    Example: C 64, nothing running or accepted, v 0, B 64, S 0 admits 64, and none more until v is 1.
    """
    by_staleness = (max_staleness + loaded_step + 1) * episodes_per_step - (accepted + running)
    return int(max(min(places - running, by_staleness), 0))
