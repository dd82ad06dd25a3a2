"""Recipes and overrides: files, keys, values, and what does not go together."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.cli.bad_case import RECIPE, Case, case, edit_json, train, warmstart, write

_POLICY = "policies.main."
_TWO = """
name = "t"
steps = 1
[policies.white]
model = "model"
[policies.black]
model = "model"
[rollout.limits]
max_context_tokens = 512
[environments.chess]
name = "sql"
"""
_LONG = "x" * 200
_ARGS = 'policies.main.engine={kind="embedded", args={%s}}'
# Overrides, and what the answer says.
_VALUES = {
    "steps=many": "steps: ",
    "steps=0": "steps: ",
    "steps=-1": "steps: ",
    "steps=1.5": "steps: ",
    "steps=": "steps: ",
    "steps=[1]": "steps: ",
    "seed=-1": "seed: ",
    "seed=x": "seed: ",
    "name=a/b": "'a/b' cannot name a folder",
    "name=..": "'..' cannot name a folder",
    "name=.hidden": "cannot name a folder",
    "name=": "cannot name a folder",
    f"name={_LONG}": "cannot name a folder",
    "name=3": "name: ",
    "runs_folder=3": "runs_folder: ",
    "policies=3": "policies: ",
    "policies={}": "policies: ",
    "environment=sql": "environment",
    "environment.name=3": "name: ",
    "environment.options=3": "options: ",
    "environment.placement=cloud": "placement: ",
    "environment.weight=0": "weight: ",
    "rollout=3": "rollout: ",
    "rollout.concurrency=0": "rollout.concurrency: ",
    "rollout.workers=some": "rollout.workers",
    "rollout.max_attempts=0": "rollout.max_attempts: ",
    "rollout.sampling.temperature=-1": "temperature: ",
    "rollout.sampling.top_k=1": "top_k: ",
    "rollout.sampling.top_p=0.5": "set top_k",
    "rollout.limits.max_turns=0": "max_turns: ",
    "rollout.limits.tool_s=0": "tool_s: ",
    "buffer.group_size=0": "buffer.group_size: ",
    "buffer.max_staleness=-1": "'unbounded'",
    "buffer.staleness=drop": "buffer.staleness: ",
    "evaluation.tasks=-1": "evaluation.tasks: ",
    "checkpoint.keep=0": "checkpoint.keep: ",
    "journal.kind=paper": "journal",
    f"{_POLICY}model=3": "policies.main.model: ",
    f"{_POLICY}frozen=perhaps": "policies.main.frozen: ",
    f"{_POLICY}frozen=true": "every policy is frozen",
    f"{_POLICY}engine=vllm": "'embedded', 'sglang', 'attached'",
    f"{_POLICY}engine.count=0": "policies.main.engine.kind is missing; give one of embedded",
    f"{_POLICY}trainer.device=tpu": "trainer.device: ",
    f"{_POLICY}trainer.dtype=int8": "trainer.dtype: ",
    f"{_POLICY}trainer.ranks=0": "trainer.ranks: ",
    f"{_POLICY}trainer.optimizer.kind=adam": "'adamw', 'sgd' or 'muon'",
    f"{_POLICY}trainer.optimizer.learning_rate=0": "learning_rate: ",
    f"{_POLICY}trainer.lora.rank=8": '"adapter" belong together',
    f"{_POLICY}publish.transport=adapter": '"adapter" belong together',
    f"{_POLICY}publish.transport=smtp": "'disk'",
    f"{_POLICY}publish.pause_mode=nap": "publish.pause_mode: ",
    f"{_POLICY}algorithm.advantage=gae": "algorithm.advantage: ",
    f"{_POLICY}algorithm.loss=mse": "'ppo'",
    f"{_POLICY}algorithm.minibatches=0": "minibatches: ",
    f"{_POLICY}chat.history=rewritten": "chat.history: ",
    f"{_POLICY}buffer.group_size=3": "set one size",
}
_UNKNOWN = {
    "stepz=3": "did you mean 'steps'?",
    "sead=3": "did you mean 'seed'?",
    "policy.main.model=x": "did you mean 'policies'?",
    "buffer.max_stalenes=3": "did you mean 'max_staleness'?",
    "rollout.concurency=3": "did you mean 'concurrency'?",
    "rollout.limit.max_turns=3": "did you mean 'limits'?",
    "rollout.max_turns=3": "did you mean 'limits.max_turns'?",
    "checkpoint.every=3": "known keys here: interval_steps, keep",
    f"{_POLICY}modle=x": "did you mean 'model'?",
    f"{_POLICY}trainer.optimzer.learning_rate=1": "did you mean 'optimizer'?",
    f"{_POLICY}trainer.learning_rate=1": "did you mean 'optimizer.learning_rate'?",
    _ARGS % "prefil_tokens=9": "did you mean 'prefill_tokens'?",
    _ARGS % "quantum=9": "`agentrl engine --help` lists them",
    "environment.nme=x": "unknown key",
}
_MALFORMED = {
    "steps": "is not of the form key.path=value",
    "=3": "is not of the form key.path=value",
    ".a=3": "is not of the form key.path=value",
    "a..b=3": "is not of the form key.path=value",
    "steps.more=3": "'steps' is a value, not a section",
    "name.first=x": "'name' is a value, not a section",
}
# What is wrong with the players, the engines or the lengths.
_PLAYERS = {
    "environment.name=sqll": ("no plugin 'sqll'", "did you mean 'sql'?"),
    "environment.name=chess": ("no plugin 'chess'", "registered: facts, signals, sql"),
    "environment.name=nothere:game": ("environment 'nothere:game'", "install its package"),
    "environment.name=not:a:name": ("environment 'not:a:name'", "module:attribute"),
    "environment.name=json:": ("environment 'json:'", "module:attribute"),
    "environment.interpreter=nothere/python": ("no Python at nothere/python", "give the path"),
    "environment.interpreter=model": ("no Python at model", "give the path"),
    "scaffold.name=tool_caling": ("no plugin 'tool_caling'", "did you mean 'tool_calling'?"),
    "scaffold.name=nothere:Agent": ("scaffold 'nothere:Agent'", "install its package"),
    "scaffold.name=a b:c": ("scaffold 'a b:c'", "module:attribute"),
    "scaffold.options.sistem=x": ("scaffold 'tool_calling'", "sistem"),
    "scaffold.name=agentrl_scaffolds.tool_calling:Nothing": ("cannot be loaded", "Nothing"),
    'environment.scorers=[{kind="function", name="f", function="nothere:f"}]': ("nothere:f", "cannot be loaded"),
    'environment.scorers=[{kind="function", name="f", function="json:nothing"}]': ("json:nothing", "cannot be loaded"),
    'environment.scorers=[{kind="function", name="f", function="json:__name__"}]': ("scorer 'f'", "not a function"),
    'environment.scorers=[{kind="function", name="f", function="json"}]': (
        "plugin json cannot be loaded",
        "module:attribute",
    ),
    'environment.scorers=[{kind="verifier"}, {kind="verifier", name="b"}]': ("have one verifier at most",),
    'environment.scorers=[{kind="verifier", weight=0}]': ("give one a weight",),
    "environment.scorers=[]": ("give one a weight",),
}
_ENGINES = {
    'engine={kind="attached", urls=["localhost:1"]}': ("'localhost:1' is no address", "http://"),
    'engine={kind="attached", urls=[]}': ("engine.attached.urls: ",),
    'engine={kind="attached", urls=["http://a:1", "http://a:1"]}': ("name each engine once",),
    'engine={kind="attached", urls=["http://a:1"]}': ("engine is attached", "evaluation.final_tasks = 0"),
    'engine={kind="sglang", command=["nothere-python"]}': ("no program nothere-python", "give the path"),
    'engine={kind="sglang", command=["python3"], devices=["0"]}': ("1 entries for 2 servers", "give one for each"),
    'engine={kind="sglang", command=[]}': ("command: ",),
    'engine={kind="embedded", count=0}': ("engine.embedded.count: ",),
    'engine={kind="embedded", threads=0}': ("engine.embedded.threads: ",),
    'engine={kind="embedded", args={dtype="int8"}}': ("engine.args", "dtype"),
    'engine={kind="embedded", args={threads=0}}': ("engine.args", "threads"),
    'engine={kind="embedded", args={device="cuda"}}': ("device is cuda", 'set it to "cpu"'),
    'trainer.device="cuda"': ('trainer.device is "cuda"', 'set it to "cpu"'),
    "trainer.ranks=100000": ("trainer.ranks is 100000", "lower it to"),
    "limits={max_context_tokens=1000}": ("policies.main.limits.max_context_tokens is 1000", "to 512 or less"),
    'engine={kind="embedded", args={context-length=100}}': ("max_context_tokens is 512", "to 100 or less"),
    "sampling={top_p=0.5}": ("set top_k",),
}
_NO_EVALUATION = ("evaluation.interval_steps=0", "evaluation.final_tasks=0")
_ATTACHED = 'policies.main.engine={kind="attached", urls=["http://a:1"], token_variable="AGENTRL_NO_SUCH_TOKEN"}'
_WARMSTARTS = {
    "output=model": ("model exists already", "choose another output"),
    "output=recipe.toml/made": ("recipe.toml is no folder", "choose another"),
    "outptu=x": ("did you mean 'output'?",),
    "seed=-1": ("seed: ",),
    "lessons=3": ("lessons: ",),
    'lessons=[{expert="guru"}]': ("no expert 'guru'", "it has expert, clumsy"),
    'lessons=[{expert="expert", agent="white"}]': ("no agent 'white'",),
    'lessons=[{expert="expert", transcripts=0}]': ("transcripts: ",),
    'lessons=[{agent="white"}]': ("lessons.0.expert is missing",),
    "environment.name=sqll": ("no plugin 'sqll'", "did you mean 'sql'?"),
    "environment.name=nothere:game": ("nothere", "cannot be loaded"),
    "environment.options.num_rowz=3": ("unknown key 'num_rowz'", "did you mean 'num_rows'?"),
    "scaffold.name=turn_takin": ("did you mean 'turn_taking'?",),
    "scaffold.options.sistem=x": ("scaffold 'tool_calling'", "sistem"),
    "trainer.ranks=100000": ("trainer.ranks is 100000", "lower it to"),
    "trainer.device=cuda": ('trainer.device is "cuda"', 'set it to "cpu"'),
    "limits.max_context_tokens=1000": ("limits.max_context_tokens is 1000", "to 512 or less"),
    'model={kind="made", shape={heads=3}}': ("hidden_size 128 is not 3 heads", "take a multiple of 6"),
    "model=cloud": ("'made', 'folder', 'gguf'",),
    'model={kind="folder", path="nowhere"}': ("no model at nowhere", "save_pretrained"),
    'model={kind="folder"}': ("model.folder.path is missing",),
    'model={kind="gguf", package="nothere_gguf", file="x.gguf"}': ("package 'nothere_gguf'", "installs it"),
    "chat.history=rewritten": ("chat.history: ",),
}


def _folder_for_a_file() -> None:
    Path("recipe.toml").unlink()
    Path("recipe.toml").mkdir()


CASES: tuple[Case, ...] = (
    *(train(override[:50], override, says=says) for override, says in _VALUES.items()),
    *(train(f"unknown-{override}", override, says=says) for override, says in _UNKNOWN.items()),
    *(train(f"malformed-{override}", override, says=("override", says)) for override, says in _MALFORMED.items()),
    *(train(f"players-{override}", override, says=says) for override, says in _PLAYERS.items()),
    *(train(f"main-{override}", _POLICY + override, says=says) for override, says in _ENGINES.items()),
    *(warmstart(override, override, says=says) for override, says in _WARMSTARTS.items()),
    train("override-is-named", "steps=many", says="override 'steps=many': "),
    train("two-faults", "steps=many", "seed=-1", says=("override 'steps=many'", "override 'seed=-1'")),
    train("no-token", _ATTACHED, *_NO_EVALUATION, says=("AGENTRL_NO_SUCH_TOKEN is not set", "export it")),
    train("uncorrected", "buffer.max_staleness=unbounded", f"{_POLICY}algorithm.correction=none", says="'tis' or"),
    train("inline-apart", "environment.placement=inline", "environment.interpreter=python3", says="leave one out"),
    train("both-forms", "environments.sql.name=sql", says="unknown key 'environment'"),
    train("runs-is-a-file", "runs_folder=recipe.toml", says=("cannot be written", "choose another runs_folder")),
    train("adapters-too-large", f"{_POLICY}trainer.lora.rank=100", f"{_POLICY}publish.transport=adapter",
          says=("trainer.lora.rank is 100", "max_lora_rank")),
    train("adapters-nowhere", f'{_POLICY}trainer.lora.target_modules=["qq_proj"]',
          f"{_POLICY}publish.transport=adapter", says=("no layers qq_proj", "agentrl model check")),
    train("experts-of-none", "rollout.sampling.routed_experts=true",
          says=("routed_experts", "needs a model with experts")),
    train("no-policies", make=write("recipe.toml", 'name="t"\nsteps=1\n'), says=("policies is missing",)),
    train("empty", make=write("recipe.toml", ""), says=("name is missing", "steps is missing")),
    train("no-toml", make=write("recipe.toml", "steps = = 3"), says=("is not a TOML file", "line 1")),
    train("key-twice", make=write("recipe.toml", RECIPE.replace("steps = 1", "steps = 1\nsteps = 2")),
          says="not a TOML"),
    train("binary", make=write("recipe.toml", b"\xff\xfe\x00"), says="is not a TOML file"),
    train("json", make=write("recipe.toml", json.dumps({"steps": 1})), says="is not a TOML file"),
    train("a-folder", make=_folder_for_a_file, says=("recipe.toml is not a TOML file", "give another")),
    train("no-agents", make=write("recipe.toml", _TWO), says="environments.chess.agents is missing"),
    train("idle", 'environments.chess.agents={white="white"}', make=write("recipe.toml", _TWO),
          says=("policies ['black']", "environments.NAME.agents")),
    train("stranger", 'environments.chess.agents={white="whte"}', make=write("recipe.toml", _TWO),
          says=("no policies ['whte']", "white, black")),
    train("long-environment", "environments.chess.limits.max_context_tokens=600",
          'environments.chess.agents={white="white", black="black"}', make=write("recipe.toml", _TWO),
          says=("environments.chess.limits.max_context_tokens is 600", "512 or less")),
    train("second-model", 'environments.chess.agents={white="white", black="black"}', "policies.black.model=nowhere",
          make=write("recipe.toml", _TWO), says=("policies.black.model: no model at nowhere",)),
    train("options-of-environment", "environment.options.num_rowz=3", "environment.placement=inline",
          says=("options of environment 'sql'", "did you mean 'num_rows'?")),
    train("options-of-a-process", "environment.options.num_rows=many",
          says=("options of environment 'sql'", "num_rows")),
    train("own-context", make=edit_json("model/config.json", max_position_embeddings=100),
          says=("rollout.limits.max_context_tokens is 512", "set rollout.limits.max_context_tokens to 100 or less")),
    case("train-nowhere", "train", "nowhere.toml", says=("no recipe at nowhere.toml", "such as sql/demo")),
    case("train-long-path", "train", "x" * 5000, says=("File name too long", "give another")),
    case("train-below-a-file", "train", "recipe.toml/x", says=("recipe.toml/x", "give another")),
    case("train-shipped-typo", "train", "sql/dmo", says="ships no dmo.toml"),
    case("train-no-such-environment", "train", "sqll/demo", says="no recipe at sqll/demo"),
    case("train-warmstart", "train", "sql/warmstart", says="`agentrl warmstart"),
    case("train-own-warmstart", "train", "warmstart.toml", says="`agentrl warmstart"),
    case("warmstart-demo", "warmstart", "sql/demo", says="`agentrl train"),
    case("warmstart-nowhere", "warmstart", "nowhere.toml", says="no recipe at nowhere.toml"),
    case("warmstart-empty", "warmstart", "recipe.toml", make=write("recipe.toml", ""), says="output is missing"),
    case("eval-nowhere", "eval", "nowhere.toml", says="no recipe at nowhere.toml"),
    case("eval-warmstart", "eval", "warmstart.toml", says="`agentrl warmstart"),
    case("eval-value", "eval", "recipe.toml", "steps=many", says="override 'steps=many'"),
    case("eval-policy", "eval", "recipe.toml", "--policy", "mian", says=("no trained policy 'mian'", "there are main")),
    case("eval-attached", "eval", "recipe.toml", 'policies.main.engine={kind="attached", urls=["http://a:1"]}',
         says=("policies.main.engine is attached", "policies.main.engine=embedded")),
    case("eval-scaffold", "eval", "recipe.toml", "scaffold.name=tool_caling", says="did you mean 'tool_calling'?"),
    case("eval-model", "eval", "recipe.toml", "policies.main.model=nowhere", says="no model at nowhere"),
    case("eval-long", "eval", "recipe.toml", "rollout.limits.max_context_tokens=999", says="512 or less"),
    case("eval-no-heldout", "eval", "recipe.toml", "environment.evaluated=false", says=("evaluated = true",)),
    case("demo-override", "demo", "--models", "m", "stepz=3", says="did you mean 'steps'?"),
    case("demo-seed", "demo", "--models", "m", "--seed", "-1", says="seed: "),
    case("demo-device", "demo", "--models", "m", "policies.main.trainer.device=cuda", says='set it to "cpu"'),
    case("demo-models-is-a-file", "demo", "--models", "recipe.toml", says=("recipe.toml", "choose another")),
)  # fmt: skip
