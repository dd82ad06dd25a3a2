"""The faults of `fault_recovery` on two servers of the real SGLang on a CPU; needs `make sglang-cpu`.

Figures as there. What its own engine has more, a phase that stages weights, SGLang has not; and a server that was
killed takes half a minute to start, which is why this runs on request only.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from agentrl.inference.config import ClientConfig, FleetConfig
from agentrl.testing.chaos import FaultPhase
from tests.benchmarks.fault_recovery import FAULTS, measure
from tests.benchmarks.fault_stage import Setting
from tests.servers.sglang import sglang_config

SGLANG_FAULTS = [fault for fault in FAULTS if fault.phase is not FaultPhase.PREPARE]


def sglang_setting() -> Setting:
    """Two tiny servers on a CPU; a pause takes them a second."""
    return Setting(
        sglang_config("dense", max_running_requests=8),
        ClientConfig(generate_s=120.0, control_s=8.0, load_s=20.0, connect_s=2.0),
        FleetConfig(probe_s=1.0, suspect_s=4.0, dead_s=8.0, wait_s=240.0),
        calm_s=1.0,
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), SGLANG_FAULTS, sglang_setting(), "fault_recovery_sglang"))


if __name__ == "__main__":
    main()
