"""TRL learns the SQL tasks: run in TRL's environment, it shares no code with agentrl.

python learn.py JOB: a JSON file with `model`, `output`, `steps`, `group_size`, `groups_per_step`, `learning_rate`,
`second_beta`, `max_turns`, `max_completion_tokens`, `template`, `seed`, and `tasks`, in the order in which they are
played, each with `question`, `schema`, `create`, `rows` and `answer`. Writes the weights of every step to `output`
and a line of `steps.jsonl` behind them.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

_SHOWN_ROWS = 8


class SqlTask:
    """One question over one table, with the tools that the policy may call."""

    def __init__(self) -> None:
        self._connection: sqlite3.Connection | None = None

    def reset(self, task: str, **_: Any) -> None:
        if self._connection is not None:
            self._connection.close()
        self._task = json.loads(task)
        self._num_queries = 0
        self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._connection.execute(self._task["create"])
        marks = ", ".join("?" * len(self._task["rows"][0]))
        table = self._task["schema"].partition("(")[0]
        self._connection.executemany(f"INSERT INTO {table} VALUES ({marks})", self._task["rows"])
        self._connection.execute("PRAGMA query_only = ON")

    def schema(self) -> str:
        """List the tables and their columns."""
        return self._task["schema"]

    def query(self, sql: str) -> str:
        """Run one SELECT and return its rows.

        Args:
            sql: the query.
        """
        try:
            rows = self._connection.execute(sql).fetchmany(_SHOWN_ROWS + 1)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            return f"error: {error}"
        self._num_queries += 1
        lines = [", ".join(map(str, row)) for row in rows[:_SHOWN_ROWS]]
        if len(rows) > _SHOWN_ROWS:
            lines.append("(more rows were cut)")
        return "\n".join(lines) or "no rows"

    def _score(self, reply: str) -> float:
        is_right = reply.strip().rstrip(".").casefold() == self._task["answer"].casefold()
        return float(is_right and self._num_queries > 0)


def reward(completions: list[list[dict]], environments: list[SqlTask], **_: Any) -> list[float]:
    """1 for the right answer after a query; the last message must be the policy's, without a call."""
    scores = []
    for messages, environment in zip(completions, environments, strict=True):
        last = messages[-1]
        is_answer = last["role"] == "assistant" and not last.get("tool_calls")
        scores.append(environment._score(last["content"]) if is_answer else 0.0)
    return scores


class KeepSteps(TrainerCallback):
    """Writes the weights of every step, and when they were there."""

    def __init__(self, output: Path) -> None:
        self._output = output

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.save_pretrained(self._output / f"step-{state.global_step}")
        line = {"step": state.global_step}
        with (self._output / "steps.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    output = Path(job["output"])
    output.mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    tokenizer.chat_template, tokenizer.response_template = job["template"], qwen3_template
    num_episodes = job["group_size"] * job["groups_per_step"]
    config = GRPOConfig(
        output_dir=str(output),
        seed=job["seed"],
        max_steps=job["steps"],
        per_device_train_batch_size=num_episodes,
        num_generations=job["group_size"],
        max_completion_length=job["max_completion_tokens"],
        max_tool_calling_iterations=job["max_turns"] - 1,
        learning_rate=job["learning_rate"],
        adam_beta2=job["second_beta"],
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        temperature=1.0,
        top_k=0,
        loss_type="dapo",
        beta=0.0,
        shuffle_dataset=False,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
    )
    rows = [
        {"prompt": [{"role": "user", "content": task["question"]}], "task": json.dumps(task)} for task in job["tasks"]
    ]
    trainer = GRPOTrainer(
        model=model,
        args=config,
        processing_class=tokenizer,
        reward_funcs=[reward],
        train_dataset=Dataset.from_list(rows),
        environment_factory=SqlTask,
        callbacks=[KeepSteps(output)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
