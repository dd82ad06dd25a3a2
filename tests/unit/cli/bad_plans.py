"""Plans of runs of which nothing tells the speed, or which no number of GPUs can have."""

from __future__ import annotations

from tests.unit.cli.bad_case import Case, case, write
from tests.unit.cli.bad_runs import made

_REMEDY = ("--from RUN", "--latencies FILE", "--rough")


def _plan(name: str, *arguments: str, says: str | tuple[str, ...], make=lambda: None) -> Case:
    return case(f"plan-{name}", "plan", "recipe.toml", *arguments, says=says, make=make)


CASES: tuple[Case, ...] = (
    _plan("no-latencies", says=_REMEDY),
    _plan("no-gpus", "--rough", "--gpus", "0", says=("0 GPUs are too few", "--gpus 2 or more")),
    _plan("one-gpu", "--rough", "--gpus", "1", says=("1 GPUs are too few", "--gpus 2 or more")),
    _plan("gpus-below-none", "--rough", "--gpus", "-3", says="-3 GPUs are too few"),
    _plan("gpus-before-latencies", "--gpus", "0", says=_REMEDY),
    _plan("run-nowhere", "--from", "nowhere", says=("nowhere is no run folder", "agentrl runs")),
    _plan("run-unfinished", "--from", "run", make=made(), says=("run has 0 finished steps", "--rough")),
    _plan("run-policy", "--from", "run", "--policy", "mian", make=made(), says=("'mian'", "there are main")),
    _plan("file-nowhere", "--latencies", "nowhere.toml", says="no file of latencies at nowhere.toml"),
    _plan("file-garbage", "--latencies", "l.toml", make=write("l.toml", "[engine"), says=("l.toml", "TOML")),
    _plan("file-key", "--latencies", "l.toml", make=write("l.toml", "[engine]\nslot = 3\n"),
          says=("l.toml", "did you mean", "slots")),
    _plan("file-negative", "--latencies", "l.toml", make=write("l.toml", "[environment]\nstart_s = -1\n"),
          says=("l.toml", "environment.start_s")),
    _plan("set-form", "--set", "engine.slots", says="'engine.slots' is not of the form key.path=value"),
    _plan("set-value", "--set", "trainer.ranks=0", says="trainer.ranks"),
    _plan("set-spread", "--set", "episodes.turns={median=4, p95=2}", says="p95 2 is below the median 4"),
)  # fmt: skip
