"""Two policies of one game both learn; one that is frozen does not move.

A speaker and a listener, a policy each, play a referential game and come to an understanding. Then a speaker learns
the language of a listener that is frozen.

Figures: `policies` with success on held-out games before and after; `frozen_moved`, the largest change of a weight of
the frozen policy in all files that its run leaves, and `frozen_engine_tensors_moved`, tensors of which its engine says
something else than the files it began with; `partner_moved` and the success of the policy beside it, which does learn.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from agentrl.telemetry.json_lines import read_json_lines
from tests.benchmarks.report import report
from tests.storms import partners

_LOOK_S = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    with tempfile.TemporaryDirectory(prefix="agentrl-partners-") as name:
        folder = Path(name)
        speaker = partners.warm_start(folder / "speaker", "speaker", f"seed={seed}")
        listener = partners.warm_start(folder / "listener", "listener", f"seed={seed}")
        fluent = partners.warm_start(folder / "fluent", "listener", f"seed={seed}", partners.FLUENT)
        process = partners.start("signals.toml", speaker, listener, folder, f"seed={seed}")
        _finished(process, folder)
        run = folder / "runs" / f"signals-seed{seed}"
        report(
            "two_policies",
            policies=[_success(run, policy) for policy in ("speaker", "listener")],
            **_frozen(speaker, fluent, folder, seed),
            seed=seed,
        )


def _frozen(speaker: Path, fluent: Path, folder: Path, seed: int) -> dict[str, object]:
    before = shutil.copytree(fluent, folder / "fluent-before")
    process = partners.start("frozen.toml", speaker, fluent, folder, f"seed={seed}")
    run = folder / "runs" / f"signals-frozen-seed{seed}"
    served: dict[str, str] = {}
    while process.poll() is None:  # the last answer counts: the engine is there as long as the run
        if _steps(run):
            served = _asked(run, fluent) or served
        time.sleep(_LOOK_S)
    _finished(process, folder)
    expected = partners.file_checksums(before)
    newest = partners.weights_left(run, "speaker")[-1]
    left = (fluent, *partners.weights_left(run, "listener"))
    return {
        "frozen_moved": max(partners.largest_change(before, of_run) for of_run in left),
        "frozen_engine_tensors": len(served.keys() & expected.keys()),
        "frozen_engine_tensors_moved": sum(served[name] != expected[name] for name in served.keys() & expected.keys()),
        "partner_moved": partners.largest_change(speaker, newest),
        "partner": _success(run, "speaker", ""),
    }


def _asked(run: Path, model: Path) -> dict[str, str]:
    try:
        return partners.engine_checksums(run, "listener", model)
    except (LookupError, OSError, partners.httpx.HTTPError):  # it ends with the run
        return {}


def _steps(run: Path) -> int:
    rows = read_json_lines(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else []
    return max((row["step"] for row in rows), default=0)


def _success(run: Path, policy: str, prefix: str | None = None) -> dict[str, object]:
    name = f"{policy}/eval/reward_mean" if prefix is None else f"{prefix}eval/reward_mean"
    means = [row[name] for row in read_json_lines(run / "metrics.jsonl") if name in row]
    return {"policy": policy, "success_before": round(means[0], 4), "success_after": round(means[-1], 4)}


def _finished(process: subprocess.Popen[bytes], folder: Path) -> None:
    if process.wait() != 0:
        raise SystemExit((folder / "output.txt").read_text()[-3000:])


if __name__ == "__main__":
    main()
