"""Bash blocks, as mini-swe-agent has them: each reply has one block of commands, which the environment's tool runs."""

from __future__ import annotations

from agentrl.protocols import Scaffold, ScaffoldContext
from agentrl_scaffolds.text_replies import FencedBlocks, choose_tool, play_in_text

_LANGUAGES = ("bash", "sh", "shell", "")
_PROMPT = """You do a task by shell commands. Put those that are to be run next into one block:
```bash
commands
```
You then read their output. Reply with one block at a time. A reply without a block is your answer and ends the task."""
_ADVICE = "Nothing was run. Reply with one closed ```bash block, or without a block to give your answer."


class Bash(Scaffold):
    """Runs the one bash block of every reply by a tool of the environment; a reply without a block is the answer.

    The tool is the opening's only one that needs exactly one argument, a string; the option `tool` names another.
    A fence may say bash, sh, shell or nothing; other blocks are text. A reply with several blocks is told the format.
    `system_prompt` stands in place of the one that tells the format.

    Example, in the environment ``terminal``: opening "Rename the csv file ..." -> reply "I look." and a block with
    ``ls`` -> call ``shell {"command": "ls"}`` -> user "Output: amber.csv" -> a block with ``mv amber.csv maple.csv`` ->
    user "Output: (no output)" -> reply "done", which ends it.
    """

    def __init__(self, tool: str | None = None, system_prompt: str = _PROMPT) -> None:
        self._tool, self._prompt = tool, system_prompt

    async def run(self, context: ScaffoldContext) -> None:
        """Play one episode to its end."""
        opening = await context.start()
        tool = choose_tool(opening.tools, self._tool)
        await play_in_text(context, opening, FencedBlocks(tool, _LANGUAGES, self._prompt, _ADVICE))
