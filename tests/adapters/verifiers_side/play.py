"""verifiers' own TrainClient, by an interpreter that has it: ``python play.py MODEL``.

Reads rollouts, a JSON object a line: a number, the base URL and the key of a gateway. Plays them, several at once,
and answers each with a line of JSON: what its trace has, its numbers not rounded, or the errors.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

# As agentrl keeps its contexts: what was said stays as it was sampled, its reasoning too.
RENDERER = {"name": "qwen3", "thinking_retention": "all"}
CONFIG = {
    "taskset": {"id": "game"},
    "agent": {"harness": {"id": "game"}, "runtime": {"type": "subprocess"}},
}


async def play(env: vf.Env, task: vf.Task, model: str, rollout: dict) -> None:
    variable = f"GATEWAY_KEY_{rollout['number']}"
    os.environ[variable] = rollout["key"]
    client = vf.TrainClientConfig(
        base_url=rollout["url"], api_key_var=variable, renderer=RENDERER, renderer_model_name=model
    )
    context = vf.ModelContext(client=client, model="agent", sampling=vf.SamplingConfig(temperature=1.0))
    (slot,) = env.slots(task)
    episode = await env.run_slot(slot, context)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    branches = [branch for trace in episode.traces for branch in trace.branches]
    answer = {
        "number": rollout["number"],
        "errors": [f"{error.type}: {error.message}" for error in errors],
        "ok": episode.ok,
        "branches": [
            {"token_ids": branch.token_ids, "mask": branch.sampled_mask, "logprobs": branch.logprobs}
            for branch in branches
        ],
    }
    print(json.dumps(answer), flush=True)


async def main() -> None:
    loop = asyncio.get_running_loop()
    env = load_environment(resolve_env_config(CONFIG))
    tasks = list(env.taskset)
    async with env.serving(), asyncio.TaskGroup() as group:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            rollout = json.loads(line)
            group.create_task(play(env, tasks[rollout["number"]], sys.argv[1], rollout))


if __name__ == "__main__":
    asyncio.run(main())
