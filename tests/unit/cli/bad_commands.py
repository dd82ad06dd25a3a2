"""Command lines that cannot be read, and options whose values do not fit."""

from __future__ import annotations

from tests.unit.cli.bad_case import Case, case

_FLAGS = {
    "train recipe.toml": "--bogus",
    "warmstart warmstart.toml": "--bogus",
    "resume run": "--salvag",
    "eval recipe.toml": "--task",
    "demo": "--sed",
    "engine model": "--prt",
    "show run": "--nams",
    "replay run 1": "--polcy",
    "doctor": "--fix",
    "runs list": "--long",
    "runs ledger run": "--outcom",
    "runs goodput run": "--last",
    "runs bias run": "--last",
    "model check model": "--render",
    "env list": "--long",
    "env serve sql": "--prt",
    "plan recipe.toml": "--gpu",
}
_MISSING = {
    "train": "recipe",
    "warmstart": "recipe",
    "resume": "run",
    "eval": "target",
    "plan": "recipe",
    "engine --port 30000": "model",
    "engine model": "--port",
    "show": "run",
    "replay": "run",
    "replay run": "step",
    "runs ledger": "run",
    "runs goodput": "run",
    "runs bias": "run",
    "model check": "folder",
    "env serve": "names",
    "submit": "recipe",
    "submit recipe.toml": "--to",
    "jobs logs": "job",
    "jobs stop": "job",
}
_TOO_MANY = ("resume run more", "show run episode more", "replay run 1 more", "doctor more", "env list more",
             "model check model more", "engine model more --port 1", "runs ledger run more")  # fmt: skip
_VALUES = {
    "eval recipe.toml --tasks 0": "'--tasks'",
    "eval recipe.toml --tasks -3": "'--tasks'",
    "eval recipe.toml --tasks many": "'--tasks'",
    "eval recipe.toml --tasks 1.5": "'--tasks'",
    "demo --seed x": "'--seed'",
    "plan recipe.toml --rough --gpus many": "'--gpus'",
    "demo --seed": "--seed",
    "replay run one": "'step'",
    "replay run 1 --device tpu": "'--device'",
    "runs ledger run --last -1": "'--last'",
    "runs ledger run --last x": "'--last'",
    "engine model --port x": "'--port'",
    "env serve sql --workers 0": "'--workers'",
    "env serve sql --max-sessions none": "'--max-sessions'",
    "env serve sql --idle-s 0": "'--idle-s'",
    "engine model --port 1 --threads x": "'--threads'",
    "engine model --port 1 --hung-step-s soon": "'--hung-step-s'",
    "submit recipe.toml --to cloud": "'--to'",
    "jobs list --on cloud": "'--on'",
}
_ENGINE = {
    "--port 70000": "port",
    "--port -1": "port",
    "--port 1 --host nonsense": "host",
    "--port 1 --host 0.0.0.0": "give --token, or listen on 127.0.0.1",
    "--port 1 --dtype int8": "dtype",
    "--port 1 --threads 0": "threads",
    "--port 1 --max-running-requests 0": "max_running_requests",
    "--port 1 --context-length 0": "context_length",
    "--port 1 --prefill-tokens 0": "prefill_tokens",
    "--port 1 --long-step-s -1": "long_step_s",
    "--port 1 --hung-step-s 0": "hung_step_s",
    "--port 1 --max-lora-rank 0": "max_lora_rank",
    "--port 1 --collective-s 0": "collective_s",
}
# Nobody listens on port 9.
_JOBS = {
    "submit recipe.toml steps=0 --to ray": "override 'steps=0': steps: ",
    "submit recipe.toml job.ray.adress=x --to ray": "did you mean 'address'?",
    "submit recipe.toml job.grace_s=0 --to ray": "job.grace_s: ",
    "submit recipe.toml job.command=[] --to ray": "job.command: ",
    "submit recipe.toml policies.main.model=none --to ray": "policies.main.model: ",
    "submit recipe.toml --to kubernetes --dry-run": "job.kubernetes.image is missing",
    "submit recipe.toml job.kubernetes.folder=here --to kubernetes": "'here' is no absolute path",
    "submit recipe.toml job.ray.address=http://127.0.0.1:9 --to ray": "no Ray job server answers at",
    "submit recipe.toml job.ray.address=head:1 --to ray": "is no URL of a Ray dashboard",
    "submit none.toml --to ray": "no recipe at none.toml",
    "jobs logs 42": "'42' names no job: give one as `agentrl jobs list` does",
    "jobs stop cloud:42": "'cloud:42' names no job",
    "jobs stop ray:": "'ray:' names no job",
    "jobs stop kubernetes:x": "give NAMESPACE/NAME",
    "jobs list --on ray --recipe none.toml": "no recipe at none.toml",
}
_DEVICES = {
    "tpux": ("--device tpux is no device", "give cpu, cuda or cuda:N"),
    "cuda:99": ("--device cuda:99", "give cpu or a smaller number"),
}
_COMMANDS = {
    "trian recipe.toml": "Did you mean 'train'",
    "evaluate recipe.toml": "No such command 'evaluate'",
    "env lst": "Did you mean 'list'",
    "model chek model": "Did you mean 'check'",
    "--verson": "--version",
}


def _name(line: str) -> str:
    return line.replace(" ", "_")


CASES: tuple[Case, ...] = (
    *(case(f"flag-{_name(c)}", *c.split(), flag, says=("No such option", flag)) for c, flag in _FLAGS.items()),
    *(case(f"missing-{_name(c)}", *c.split(), says=("Missing", f"'{what}'", "--help")) for c, what in _MISSING.items()),
    *(
        case(f"too-many-{_name(c)}", *c.split(), says=("unexpected extra argument", "more", "--help"))
        for c in _TOO_MANY
    ),
    *(case(f"value-{_name(c)}", *c.split(), says=(what, "--help")) for c, what in _VALUES.items()),
    *(
        case(f"engine-{_name(c)}", "engine", "model", *c.split(), says=("agentrl engine: ", w))
        for c, w in _ENGINE.items()
    ),
    *(case(f"jobs-{_name(c).replace('/', '_')}", *c.split(), says=what) for c, what in _JOBS.items()),
    *(
        Case(f"engine-device-{device}", ("engine", "model", "--port", "0", "--device", device), says, is_light=False)
        for device, says in _DEVICES.items()
    ),
    case(
        "engine-two-tokens",
        "engine",
        "model",
        "--port",
        "1",
        "--token",
        "a",
        "--token-variable",
        "B",
        says="--token and --token-variable both name a token",
    ),
    case(
        "engine-unset-token",
        "engine",
        "model",
        "--port",
        "1",
        "--token-variable",
        "AGENTRL_NOT_SET",
        says="the variable AGENTRL_NOT_SET is not set; put the token into it",
    ),
    case("engine-empty-token", "engine", "model", "--port", "1", "--token", "", says="token"),
    *(case(f"command-{_name(c)}", *c.split(), says=(what, "--help")) for c, what in _COMMANDS.items()),
)
