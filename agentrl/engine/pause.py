"""How an engine can be paused."""

from __future__ import annotations

from enum import StrEnum


class PauseMode(StrEnum):
    """What a pause does to requests in flight: give them back, put them back in the queue, freeze them."""

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"
