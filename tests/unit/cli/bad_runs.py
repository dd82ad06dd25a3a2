"""Commands on runs that do not exist, are broken, or do not have what is asked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from agentrl.config.base import parse_config
from agentrl.orchestration.config import RunConfig
from tests.unit.cli.bad_case import Case, Make, both, case, edit_json, write

_VERSIONS = {"main": {"epoch": 0, "step": 1}}
_READERS = (("show",), ("replay", "1"), ("runs ledger",), ("runs goodput",), ("runs bias",), ("resume",), ("eval",))


def _call(words: tuple[str, ...], run: str) -> list[str]:
    command, *rest = words
    return [*command.split(), run, *rest]


def made(journal: str = "segments", status: str | None = None, **policies: str) -> Make:
    """A run folder as one that began has it; `policies` are model folders by name."""

    def make() -> None:
        models = policies or {"main": "model"}
        table = {
            "name": "t",
            "steps": 9,
            "journal": {"kind": journal},
            "policies": {name: {"model": model} for name, model in models.items()},
            "environments": {"sql": {"name": "sql", "agents": {name: name for name in models}}},
            "rollout": {"limits": {"max_context_tokens": 512}},
        }
        for folder in ("logs", "episodes", "weights", "checkpoints", "journal"):
            Path("run", folder).mkdir(parents=True)
        Path("run/config.json").write_text(parse_config(RunConfig, table, "test").model_dump_json())
        if status is not None:
            Path("run/state.json").write_text(json.dumps({"status": status, "versions": _VERSIONS, "message": ""}))

    return make


_BROKEN: dict[str, tuple[Make, tuple[str, ...]]] = {
    "config-empty": (both(made(), write("run/config.json", "")), ("run/config.json", "restore")),
    "config-cut": (both(made(), write("run/config.json", '{"name": ')), ("run/config.json", "restore")),
    "config-binary": (both(made(), write("run/config.json", b"\xff\xff")), ("run/config.json", "restore")),
    "config-list": (both(made(), write("run/config.json", "[]")), ("run/config.json",)),
    "config-other": (both(made(), edit_json("run/config.json", stepz=3)), ("unknown key 'stepz'", "'steps'")),
}

CASES: tuple[Case, ...] = (
    *(case(f"run-nowhere-{_call(c, '')[0:2]}", *_call(c, "nowhere"), says=("nowhere", "no ")) for c in _READERS),
    *(case(f"run-empty-{_call(c, '')[0:2]}", *_call(c, "empty"), make=lambda: Path("empty").mkdir(),
           says=("empty is no run folder", "`agentrl runs` lists the runs")) for c in _READERS),
    *(case(f"run-a-file-{_call(c, '')[0:2]}", *_call(c, "model/config.json"), says=("is no run folder",))
      for c in _READERS if c != ("eval",)),
    *(case(f"run-{name}-{words[0].replace(' ', '-')}", *_call(words, "run"), make=make, says=says)
      for name, (make, says) in _BROKEN.items() for words in (("show",), ("resume",), ("eval",), ("replay", "1"))),
    case("runs-nowhere", "runs", "nowhere", says=("no folder nowhere", "agentrl train")),
    case("runs-list-a-file", "runs", "list", "recipe.toml", says=("no folder recipe.toml", "agentrl train")),
    case("resume-finished", "resume", "run", make=made(status="finished"), says=("is finished", "nothing is left")),
    case("resume-state", "resume", "run", make=both(made(), write("run/state.json", "{")),
          says="state.json is damaged"),
    case("resume-model", "resume", "run", make=both(made(), lambda: shutil.rmtree("model")),
         says=("policies.main.model: no model at model", "save_pretrained")),
    case("resume-weights", "resume", "run", make=both(made(), write("model/model.safetensors", b"")),
         says=("model.safetensors", "is cut off")),
    case("resume-plugin", "resume", "run", make=both(made(), edit_json("run/config.json", environments={
        "sql": {"name": "sqll"}})), says="did you mean 'sql'?"),
    case("eval-run-overrides", "eval", "run", "seed=3", make=made(), says="give a recipe to override it"),
    case("eval-run-policy", "eval", "run", "--policy", "mian", make=made(), says=("'mian'", "there are main")),
    case("eval-run-which", "eval", "run", make=made(white="model", black="model"), says="say which with --policy"),
    case("eval-run-model", "eval", "run", make=both(made(), lambda: shutil.rmtree("model")), says="no model at model"),
    case("show-nothing", "show", "run", make=made(), says=("train.jsonl", "kinds are train, heldout and failed")),
    case("show-kind", "show", "run", "--kind", "lost", make=made(),
          says=("lost", "kinds are train, heldout and failed")),
    case("show-empty", "show", "run", make=both(made(), write("run/episodes/train.jsonl", "")),
          says="holds no episode"),
    case("show-garbage", "show", "run", make=both(made(), write("run/episodes/train.jsonl", "{}\nx\n")),
         says=("train.jsonl holds a line that is no episode", "restore it from a copy")),
    case("replay-none", "replay", "run", "1", make=made(), says=("step 1 of", "no step of this run can be replayed")),
    case("replay-zero", "replay", "run", "0", make=made(), says=("step 0 of", "no step of this run can be replayed")),
    case("replay-unkept", "replay", "run", "1", make=made(journal="none"), says=("kept no journal", "not on record")),
    case("replay-policy", "replay", "run", "1", "--policy", "mian", make=made(), says=("'mian'", "there are main")),
    case("replay-which", "replay", "run", "1", make=made(white="model", black="model"), says="say which with --policy"),
    *(case(f"ledger-missing-{command}", "runs", command, "run", make=made(), says=("no ", "ledger.jsonl"))
      for command in ("ledger", "goodput", "bias")),
    *(case(f"ledger-other-{command}", "runs", command, "run", says=("ledger.jsonl", "line 1"),
           make=both(made(), write("run/ledger.jsonl", '{"columns": 3}\n'))) for command in
             ("ledger", "goodput", "bias")),
    case("ledger-outcome", "runs", "ledger", "run", "--outcome", "lost", says=("lost", "trained", "dropped"),
         make=both(made(), write("run/ledger.jsonl", ""))),
)  # fmt: skip
