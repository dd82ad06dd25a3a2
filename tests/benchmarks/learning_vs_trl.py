"""How fast TRL and agentrl learn the same: one warm-started model, tasks, optimizer and group size, on this machine.

TRL's GRPOTrainer plays with `environment_factory` and transformers' generation, in an environment of its own
(``make bench BENCH=learning_vs_trl`` makes it). agentrl runs its demo's recipe; the learning rate of both is constant.
Both keep the weights of every step; afterwards one engine plays the same held-out tasks with each, so that evaluation
costs neither of them anything.

Figures, medians over the seeds of agentrl's over TRL's: `episodes_ratio`, trained episodes until 0.9 of the held-out
tasks succeed (interpolated between steps); `seconds_ratio`, seconds from the start of the process until then;
`processor_ratio`, processor time of a step, of all processes. `seeds` has each seed's figures, agentrl's first;
`max_staleness` is agentrl's, TRL has none.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from agentrl.cli.demo import recipe, warm_start
from agentrl.orchestration.config import RunConfig, load_run_config
from agentrl.tokens.chat import ChatFormat
from agentrl.tokens.tokenizer import FastTokenizer
from agentrl.types.message import Message, Role
from agentrl.types.task import Split
from agentrl_environments.sql import definition
from agentrl_environments.sql.database import Database
from agentrl_environments.sql.environment import TOOLS
from agentrl_environments.sql.tasks import SqlOptions, build_problem
from tests.benchmarks.heldout_curve import crossing, heldout_curve
from tests.benchmarks.report import report
from tests.benchmarks.watched import Steps, watch

ROOT = Path(__file__).parents[2]
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
TRL_SIDE = Path(__file__).parent / "trl_side"
LEVEL = 0.9
STEPS = 20
# TRL limits what comes after the prompt, agentrl the whole context.
LONGEST_PROMPT_TOKENS = 192
# The chat format of the demo's models, in the form that TRL extends turn by turn. The tools are spelled out, since
# TRL would describe their parameters in other words than those that the model has learned.
TEMPLATE = (
    "{{- '<|im_start|>system\\n' + SYSTEM + '<|im_end|>\\n' }}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}"
    "{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}"
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson + '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- else %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def trl_template(model: Path, chat: ChatFormat) -> str:
    """`TEMPLATE` with the system message that agentrl writes."""
    opening = FastTokenizer.load(model).decode(chat.open([Message(Role.USER, "x")], TOOLS).tolist())
    system = opening.removeprefix("<|im_start|>system\n").partition("<|im_end|>")[0]
    return TEMPLATE.replace("SYSTEM", json.dumps(system))


def trl_tasks(seed: int, count: int) -> list[dict[str, Any]]:
    """The first training tasks of a seed, in the order of agentrl's run."""
    options, tasks = SqlOptions(), []
    sample = definition.sampler(options, Split.TRAIN, seed)
    for ordinal in range(count):
        problem = build_problem(options, sample(ordinal).payload["seed"], Split.TRAIN)
        database = Database(problem, options)
        tasks.append(
            {
                "question": problem.question,
                "schema": f"{problem.table}(name, {', '.join(problem.columns)})",
                "create": f"CREATE TABLE {problem.table} "
                f"(name TEXT, {', '.join(f'{column} INTEGER' for column in problem.columns)})",
                "rows": problem.rows,
                "answer": str(database.run(problem.query)[0][0]),
            }
        )
        database.close()
    return tasks


def run_trl(config: RunConfig, model: Path, folder: Path, threads: int) -> tuple[Steps, list[Path]]:
    """TRL's steps, and the folders of their weights."""
    policy = config.policies["main"]
    job = {
        "model": str(model),
        "output": str(folder / "trl"),
        "seed": config.seed,
        "steps": config.steps,
        "threads": threads,
        "group_size": config.buffer.group_size,
        "groups_per_step": config.buffer.groups_per_step,
        "learning_rate": policy.trainer.optimizer.learning_rate,
        "second_beta": policy.trainer.optimizer.second_beta,
        "max_turns": config.rollout.limits.max_turns,
        "max_completion_tokens": config.rollout.limits.max_context_tokens - LONGEST_PROMPT_TOKENS,
        "template": trl_template(model, ChatFormat.load(model, policy.chat)),
        "tasks": trl_tasks(config.seed, config.steps * config.buffer.groups_per_step),
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    command = [str(TRL_PYTHON), str(TRL_SIDE / "learn.py"), str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    steps = watch(command, folder / "trl" / "steps.jsonl", '"step"', folder / "trl.log", environment)
    return steps, [folder / "trl" / f"step-{step}" for step in range(1, config.steps + 1)]


def run_agentrl(values: list[str], folder: Path) -> tuple[Steps, list[Path]]:
    """agentrl's steps, and the folders of their weights."""
    config = load_run_config(recipe("demo.toml"), values)
    run = config.runs_folder / f"{config.name}-seed{config.seed}"
    command = [sys.executable, "-m", "agentrl.cli.main", "train", str(recipe("demo.toml")), *values]
    steps = watch(command, run / "metrics.jsonl", '"time/train_step_s"', folder / "agentrl.log", os.environ)
    return steps, [run / "weights" / "main" / f"0.{step}" for step in range(1, config.steps + 1)]


def recipe_digest() -> str:
    """Changes with the recipe of the warm start, whose models are kept."""
    return hashlib.sha256(recipe("warmstart.toml").read_bytes()).hexdigest()[:8]


def compare(seed: int, model: Path, folder: Path, num_tasks: int, threads: int) -> dict[str, Any]:
    """The figures of one seed, agentrl's first."""
    values = [
        f"seed={seed}",
        f"policies.main.model={model}",
        f"runs_folder={folder}",
        f"steps={STEPS}",
        f"policies.main.publish.keep_versions={STEPS + 1}",
        "policies.main.trainer.optimizer.decay_steps=0",
        "evaluation.interval_steps=0",
        "evaluation.final_tasks=0",
    ]
    config = load_run_config(recipe("demo.toml"), values)
    ours, our_weights = run_agentrl(values, folder)
    theirs, their_weights = run_trl(config, model, folder, threads)
    figures: dict[str, Any] = {"seed": seed}
    curves = {}
    for name, weights in (("agentrl", our_weights), ("trl", their_weights)):
        logs = folder / f"{name}-logs"
        curves[name] = asyncio.run(heldout_curve(config, model, weights, num_tasks, LEVEL, logs))
        figures[f"{name}_curve"] = [round(value, 3) for value in curves[name]]
    for key in ("episodes_to_0.9", "seconds_to_0.9", "processor_s_per_step"):
        figures[key] = []
    for name, steps in (("agentrl", ours), ("trl", theirs)):
        step = crossing(curves[name], LEVEL)
        if step is None:
            raise SystemExit(f"{name} with seed {seed} does not reach {LEVEL} in {STEPS} steps; see {folder}")
        figures["episodes_to_0.9"].append(round(step * config.buffer.episodes_per_step))
        figures["seconds_to_0.9"].append(round(steps.reached_s(step), 2))
        figures["processor_s_per_step"].append(round(steps.processor_s_per_step, 3))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--tasks", type=int, default=400, help="held-out tasks of each evaluation")
    parser.add_argument("--trl-threads", type=int, default=2, help="threads of TRL's torch")
    parser.add_argument("--folder", type=Path, default=Path("runs") / "learning_vs_trl", help="models and runs")
    arguments = parser.parse_args()
    if not TRL_PYTHON.exists():
        raise SystemExit("TRL is not installed; run `make bench BENCH=learning_vs_trl`")
    seeds = []
    for seed in arguments.seeds:
        folder = arguments.folder / f"seed{seed}"
        model = folder / f"model-{recipe_digest()}"
        if not model.exists():
            warm_start(seed, model)
        attempt = folder / f"attempt-{sum(1 for _ in folder.glob('attempt-*'))}"
        attempt.mkdir()
        seeds.append(compare(seed, model, attempt, arguments.tasks, arguments.trl_threads))
        print(json.dumps(seeds[-1]), flush=True)

    def ratio(name: str) -> float:
        return round(statistics.median(seed[name][0] / seed[name][1] for seed in seeds), 3)

    report(
        "learning_vs_trl",
        episodes_ratio=ratio("episodes_to_0.9"),
        seconds_ratio=ratio("seconds_to_0.9"),
        processor_ratio=ratio("processor_s_per_step"),
        max_staleness=load_run_config(recipe("demo.toml"), []).buffer.max_staleness,
        heldout_tasks=arguments.tasks,
        seeds=seeds,
    )


if __name__ == "__main__":
    main()
