"""A taskset of several turns, and the harness that plays it in the process of verifiers itself."""

from __future__ import annotations

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

__all__ = ["CountHarness", "CountTaskset"]

TURNS = 4
QUERY = {"name": "query", "description": "Query.", "parameters": {"type": "object", "properties": {"sql": {}}}}


class CountTask(vf.Task[vf.TaskData]):
    """Asks for a count; whoever answers in four turns is done."""

    @vf.reward
    async def said_something(self, trace: vf.Trace) -> float:
        return float(trace.num_turns == TURNS)


class CountTaskset(vf.Taskset[CountTask, vf.TasksetConfig]):
    """Tasks that differ in their first question."""

    def load(self):
        for number in range(8):
            yield CountTask(vf.TaskData(prompt=f"what is the count of name {number}?"), self.config.task)


class CountHarness(vf.Harness[vf.HarnessConfig]):
    """Goes on for so many turns: with the result of a call that was made, else with another question."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as api:
            for turn in range(TURNS):
                tools = [{"type": "function", "function": QUERY}]
                answer = await api.chat.completions.create(model=ctx.model, messages=messages, tools=tools)
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                results = [
                    {"role": "tool", "tool_call_id": call.id, "content": f"result {turn}"}
                    for call in message.tool_calls or ()
                ]
                messages += results or [{"role": "user", "content": f"and then {turn}?"}]
        return ProgramResult(exit_code=0, stdout="", stderr="")
