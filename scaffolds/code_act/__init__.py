"""Code as the action: each reply has one block of code, which the environment's tool runs (arXiv 2402.01030)."""

from __future__ import annotations

from agentrl.protocols import Scaffold, ScaffoldContext
from agentrl_scaffolds.text_replies import FencedBlocks, choose_tool, play_in_text

_PROMPT = """You do a task by code. Put what is to be run next into one block:
```
code
```
You then read its output. Reply with one block at a time. A reply without a block is your answer and ends the task."""
_ADVICE = "Nothing was run. Reply with one closed block of code, or without a block to give your answer."


class CodeAct(Scaffold):
    """Runs the one block of code of every reply by a tool of the environment; a reply without a block is the answer.

    What the code is written in, the tool says, whose name and description follow the system prompt; a fence may name
    any language. The tool is the opening's only one that needs exactly one argument, a string; the option `tool` names
    another. `system_prompt` stands in place of the one that tells the format.

    Example, in the environment ``sql``: opening "What is the largest net cost?" -> a block with
    ``SELECT MAX(net_cost) FROM east_stock`` -> call ``query {"sql": "SELECT ..."}`` -> user "Output: 93" -> reply "93",
    which ends it.
    """

    def __init__(self, tool: str | None = None, system_prompt: str = _PROMPT) -> None:
        self._tool, self._prompt = tool, system_prompt

    async def run(self, context: ScaffoldContext) -> None:
        """Play one episode to its end."""
        opening = await context.start()
        tool = choose_tool(opening.tools, self._tool)
        instructions = f"{self._prompt}\n\nThe code is run by {tool.name}: {tool.description}"
        await play_in_text(context, opening, FencedBlocks(tool, (), instructions, _ADVICE))
