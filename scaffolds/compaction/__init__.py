"""Native function calling in a bounded context: a long conversation goes on from a summary that the policy writes."""

from __future__ import annotations

from agentrl.protocols import Scaffold, ScaffoldContext
from agentrl.types.errors import ConfigError
from agentrl.types.message import Message, Role

_REQUEST = Message(
    Role.USER,
    "Your conversation is about to be replaced by a summary. Write it now, without calling a tool: what you have done "
    "and found out, and what is left to do.",
)
_INTRODUCTION = "Summary of what you have done so far:\n"


class Compaction(Scaffold):
    """As `tool_calling`, but from `compact_at_tokens` of context on the history is summarised into a new branch.

    The policy is asked for a summary: a turn like any other, which is trained and counts for `max_turns`. The next
    reply continues a new branch of the episode: the opening, the summary, and what the user has said last (the next
    question; results of tools are left to the summary). A tool that the policy calls in its summary is not run. Choose
    `compact_at_tokens` so that one more result, a summary and its request fit into ``max_context_tokens``, and
    above what opening and summary take: else every step is summarised.

    Example of ``compact_at_tokens = 800``: opening -> call -> result, and the context has 900 tokens -> the result and
    "Write it now ..." -> "The table is east_stock, with net_cost." -> on a new branch the opening and "Summary of what
    you have done so far: The table is ..." -> the next call.
    """

    def __init__(self, compact_at_tokens: int, system_prompt: str | None = None) -> None:
        if compact_at_tokens <= 0:
            raise ConfigError(f"compaction: compact_at_tokens is {compact_at_tokens}; give a number above 0")
        self._compact_at_tokens = compact_at_tokens
        self._system = (Message(Role.SYSTEM, system_prompt),) if system_prompt else ()

    async def run(self, context: ScaffoldContext) -> None:
        """Play one episode to its end."""
        opening = await context.start()
        beginning = (*self._system, *opening.messages)
        reply = await context.generate(beginning, opening.tools)
        while not (result := await context.step(reply)).is_done:
            if context.context_tokens < self._compact_at_tokens:
                reply = await context.generate(result.messages, opening.tools)
                continue
            summary = await context.generate((*result.messages, _REQUEST), opening.tools)
            told = Message(Role.USER, _INTRODUCTION + summary.content)
            asked = tuple(message for message in result.messages if message.role is Role.USER)
            reply = await context.rewrite((*beginning, told, *asked), opening.tools)
