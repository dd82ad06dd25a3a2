from __future__ import annotations

from pathlib import Path

import pytest
from fault_survival import check_survival

from agentrl.testing.chaos import Fault, FaultKind, FaultPhase
from agentrl.types.weights import PauseMode
from agentrl.weights.config import PublishConfig
from tests.storms.fault_recovery import make_models, play_hopeless
from tests.storms.fault_stage import Stage

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
FAULTS_OF_A_DRAIN = [
    Fault(FaultKind.HANG, FaultPhase.GENERATE),
    Fault(FaultKind.KILL, FaultPhase.GENERATE),
    Fault(FaultKind.LOST_REPLY, FaultPhase.GENERATE),
    Fault(FaultKind.LOST_REPLY, FaultPhase.PAUSE),
]
DRAIN_S = 0.1


async def test_the_other_engine_goes_on_whatever_befalls_one(tmp_path: Path) -> None:
    await check_survival(Stage(*make_models(tmp_path), tmp_path), FAULTS)


async def test_the_other_engine_goes_on_whatever_befalls_one_that_drains(tmp_path: Path) -> None:
    stage = Stage(*make_models(tmp_path), tmp_path, publish=PublishConfig(pause_mode=PauseMode.DRAIN, drain_s=DRAIN_S))
    await check_survival(stage, FAULTS_OF_A_DRAIN)
    assert stage.publisher.counts.drained > 0
    assert stage.publisher.counts.cut > 0, "no reply outlived a drain"


async def test_a_run_without_engines_ends_and_names_engine_and_phase(tmp_path: Path) -> None:
    assert await play_hopeless(make_models(tmp_path), tmp_path) == 2
