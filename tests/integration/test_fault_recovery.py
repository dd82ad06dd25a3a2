from __future__ import annotations

from pathlib import Path

import pytest
from fault_survival import check_survival

from agentrl.testing.chaos import Fault, FaultKind, FaultPhase
from tests.benchmarks.fault_recovery import make_models, play_hopeless
from tests.benchmarks.fault_stage import Stage

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
    await check_survival(Stage(*make_models(tmp_path), tmp_path), FAULTS)


async def test_a_run_without_engines_ends_and_names_engine_and_phase(tmp_path: Path) -> None:
    assert await play_hopeless(make_models(tmp_path), tmp_path) == 2
