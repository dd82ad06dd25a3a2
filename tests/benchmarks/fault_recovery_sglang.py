"""The faults of `fault_recovery` on two servers of the real SGLang on a CPU; needs `make sglang-cpu`.

Figures as there. What its own engine has more, a phase that stages weights, SGLang has not; and a server that was
killed takes half a minute to start, which is why this runs on request only.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from agentrl.testing.chaos import FaultPhase
from tests.benchmarks.fault_recovery import FAULTS, measure
from tests.storms.fault_stage import sglang_setting

SGLANG_FAULTS = [fault for fault in FAULTS if fault.phase is not FaultPhase.PREPARE]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), SGLANG_FAULTS, sglang_setting(), "fault_recovery_sglang"))


if __name__ == "__main__":
    main()
