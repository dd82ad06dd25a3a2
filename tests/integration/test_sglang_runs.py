"""Servers of the real SGLang that a run starts itself: trained against, killed, hung, lied to."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from fault_survival import check_survival

from agentrl.inference.config import SGLangEngineConfig
from agentrl.testing.chaos import Fault, FaultKind, FaultPhase
from tests.integration import runs
from tests.storms.fault_recovery import GAP_LIMIT_NATS, make_models
from tests.storms.fault_stage import Stage, sglang_setting

Config = Callable[[str], SGLangEngineConfig]


def _table(config: SGLangEngineConfig) -> str:
    """A configuration as the command line takes it."""

    def value(of: object) -> str:
        if isinstance(of, dict):
            return "{" + ", ".join(f'"{key}" = {value(item)}' for key, item in of.items()) + "}"
        if isinstance(of, list):
            return "[" + ", ".join(map(value, of)) + "]"
        return str(of).lower() if isinstance(of, bool) else f'"{of}"' if isinstance(of, str) else str(of)

    return value(config.model_dump(exclude_defaults=True))


async def test_a_run_trains_on_sglang_and_goes_on_when_its_server_dies(
    sglang: Config, tiny_model: Path, tmp_path: Path
) -> None:
    engine = f"policies.main.engine={_table(sglang('dense'))}"
    process = runs.start(tmp_path, tiny_model, runs.ENDLESS, engine, "buffer.max_staleness=2", "buffer.stall_s=280")
    run = tmp_path / "runs" / "test-seed0"
    runs.wait_for_step(run, 3, process)
    gaps = [row["trainer/fresh_gap_max_nats"] for row in runs.metrics(run) if row.get("trainer/fresh_tokens")]
    assert gaps
    assert max(gaps) < GAP_LIMIT_NATS
    os.kill(runs.engine_of(run), signal.SIGKILL)
    step = runs.metrics(run)[-1]["step"]
    runs.wait_for_step(run, step + 4, process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=200)[0]
    assert process.returncode == runs.STOPPED, output
    assert runs.processes_are_gone(run)


# What depends on the server; all kinds and phases are played with embedded engines (test_fault_recovery).
FAULTS = [
    Fault(FaultKind.LOST_REPLY, FaultPhase.SWAP),
    Fault(FaultKind.WRONG_WEIGHTS, FaultPhase.SWAP),
    Fault(FaultKind.OLD_WEIGHTS, FaultPhase.GENERATE),
    Fault(FaultKind.HANG, FaultPhase.SWAP),
]


async def test_the_other_server_goes_on_whatever_befalls_one(sglang: Config, tmp_path: Path) -> None:
    await check_survival(Stage(*make_models(tmp_path), tmp_path, sglang_setting()), FAULTS)
