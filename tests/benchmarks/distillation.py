"""A student of a quarter of its teacher's parameters learns from the teacher's log-probabilities, by recipes alone.

The demo makes and trains the teacher, `student.toml` makes the student, `distill.toml` distils. `--teacher` takes the
run folder of a demo that has been played instead.

Figures: success on held-out tasks of `teacher`, `student_before` and `student_after`; `share`, the student's success
over the teacher's; parameters of both; `seconds` of the distillation, evaluations included.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path

from safetensors import safe_open

from agentrl.orchestration.run_directory import RunDirectory
from agentrl.telemetry.json_lines import read_json_lines
from tests.benchmarks.report import report
from tests.storms.agentrl_command import run_agentrl

_RECIPES = Path(__file__).parents[2] / "environments" / "sql"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--teacher", type=Path, help="run folder of a demo that has ended")
    parser.add_argument("overrides", nargs="*", help="key.path=value of the distillation")
    arguments = parser.parse_args()
    seed = arguments.seed
    with tempfile.TemporaryDirectory(prefix="agentrl-distillation-") as name:
        folder = Path(name)
        taught = arguments.teacher or _play_demo(folder, seed)
        teacher, student = RunDirectory.open(taught).newest_model("main"), folder / "student"
        made = [f"output={student}", f"model.tokenizer={teacher}", f"seed={seed}"]
        run_agentrl("warmstart", str(_RECIPES / "student.toml"), *made)
        models = [f"policies.student.model={student}", f"policies.teacher.model={teacher}"]
        began = time.monotonic()
        runs = [f"runs_folder={folder / 'runs'}", f"seed={seed}", *arguments.overrides]
        run_agentrl("train", str(_RECIPES / "distill.toml"), *models, *runs)
        success = _successes(folder / "runs" / f"sql-distill-seed{seed}")
        report(
            "distillation",
            teacher=_successes(taught)[-1],
            student_before=success[0],
            student_after=success[-1],
            share=round(success[-1] / _successes(taught)[-1], 4),
            teacher_parameters=_parameters(teacher),
            student_parameters=_parameters(student),
            seconds=round(time.monotonic() - began, 1),
            seed=seed,
        )


def _play_demo(folder: Path, seed: int) -> Path:
    run_agentrl("demo", "--seed", str(seed), "--models", str(folder / "models"), f"runs_folder={folder / 'runs'}")
    return folder / "runs" / f"sql-demo-seed{seed}"


def _successes(run: Path) -> list[float]:
    rows = read_json_lines(run / "metrics.jsonl")
    return [round(row["eval/reward_mean"], 4) for row in rows if "eval/reward_mean" in row]


def _parameters(model: Path) -> int:
    found = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            found += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 - no dict
    return found


if __name__ == "__main__":
    main()
