"""What must hold of a fleet of two whose first engine is struck by one fault after the other."""

from __future__ import annotations

from agentrl.testing.chaos import Fault
from tests.storms.fault_recovery import GAP_LIMIT_NATS, play_faults, play_unprotected
from tests.storms.fault_stage import Stage, started


async def check_survival(stage: Stage, faults: list[Fault]) -> None:
    """The other engine goes on, the struck one comes back, no token is wrong; without protection that is found."""
    async with started(stage, "a", "b"):
        outcomes = await play_faults(stage, faults)
        assert outcomes.hangs == []
        assert outcomes.recovered == len(faults)
        assert outcomes.held == [], outcomes.held
        assert stage.failed_episodes == []
        assert stage.max_gap() < GAP_LIMIT_NATS
        assert stage.unproven_spans() == 0
        gap, unproven = await play_unprotected(stage)
    assert gap > GAP_LIMIT_NATS, "without receipts, wrong weights show in the tokens"
    assert unproven > 0, "without the fence, old weights come through"
