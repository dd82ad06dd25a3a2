"""Runs benchmarks by name, one process each: python -m tests.benchmarks.all [NAME...]"""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = (
    "session_cost",
    "journal_rate",
    "journal_open",
    "memory_flat",
    "rollout_overhead",
    "async_vs_sync",
    "selection_bias",
    "environment_mix",
    "batch_building",
    "gate",
    "abort_storm",
    "replay_gap",
    "fault_recovery",
    "long_episode",
    "kill_storm",
    "worker_storm",
    "server_storm",
    "gateway_storm",
    "scoring_delay",
    "scorer_faults",
    "sandbox_kills",
    "power_loss",
    "control",
    "two_policies",
    "distillation",
    "self_play",
    "proposer_solver",
)
ON_REQUEST = (
    "abort_storm_sglang",
    "fault_recovery_sglang",
    "publish_gap",
    "learning_vs_trl",
    "trainer_vs_trl",
    "server_vs_openenv",
    "ray_vs_local",
    "ray_kill_storm",
    "sandbox_latency",
    "sandbox_escape",
    "plan_accuracy",
    "bfcl_gold",
)


def main() -> None:
    names = sys.argv[1:] or BENCHMARKS
    known = (*BENCHMARKS, *ON_REQUEST)
    unknown = sorted(set(names) - set(known))
    if unknown:
        sys.exit(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    failed = [name for name in names if subprocess.run([sys.executable, "-m", f"tests.benchmarks.{name}"]).returncode]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
