from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.testing.chaos import Fault, FaultKind, FaultPhase
from tests.benchmarks.fault_recovery import GAP_LIMIT_NATS, make_models, play_faults, play_hopeless, play_unprotected
from tests.benchmarks.fault_stage import Stage, started

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

FAULTS = [
    Fault(FaultKind.KILL, FaultPhase.SWAP),
    Fault(FaultKind.HANG, FaultPhase.GENERATE),
    Fault(FaultKind.HANG, FaultPhase.CANARY),
    Fault(FaultKind.KILL, FaultPhase.PREPARE),
    Fault(FaultKind.LOST_REPLY, FaultPhase.PAUSE),
    Fault(FaultKind.DUPLICATED, FaultPhase.RESUME),
    Fault(FaultKind.SLOW, FaultPhase.RECEIPT),
    Fault(FaultKind.WRONG_WEIGHTS, FaultPhase.SWAP),
    Fault(FaultKind.OLD_WEIGHTS, FaultPhase.GENERATE),
]


async def test_the_other_engine_goes_on_whatever_befalls_one(tmp_path: Path) -> None:
    stage = Stage(*make_models(tmp_path), tmp_path)
    async with started(stage, "a", "b"):
        outcomes = await play_faults(stage, FAULTS)
        assert outcomes.hangs == []
        assert outcomes.recovered == len(FAULTS)
        assert outcomes.held == []
        assert stage.failed_episodes == []
        assert stage.max_gap() < GAP_LIMIT_NATS
        assert stage.unproven_spans() == 0
        gap, unproven = await play_unprotected(stage)
    assert gap > GAP_LIMIT_NATS, "without receipts, wrong weights show in the tokens"
    assert unproven > 0, "without the fence, old weights come through"


async def test_a_run_without_engines_ends_and_names_engine_and_phase(tmp_path: Path) -> None:
    assert await play_hopeless(make_models(tmp_path), tmp_path) == 2
