from __future__ import annotations

from rollout_parts import ANSWER, CALL, in_turn, play

from agentrl.protocols import ScaffoldContext
from agentrl.testing.recording_journal import RecordingJournal
from agentrl.testing.scripted import AbortingEngine, ScriptedEngine
from agentrl.types.errors import Boundary
from agentrl.types.message import Message, Role, ToolCall


def calling(*ids: str) -> Message:
    return Message(Role.ASSISTANT, "", tuple(ToolCall(name, "query", {"n": n}) for n, name in enumerate(ids)))


class MakesCalls:
    """Acts by calls of its own, some of which it gives an id."""

    async def run(self, context: ScaffoldContext) -> None:
        opening = await context.start()
        await context.generate(opening.messages)
        results = await context.step(calling("", "mine", ""))
        self.answered = [message.tool_call_id for message in results.messages]
        await context.generate(results.messages)
        await context.step(calling(""))
        await context.step(ANSWER)


async def test_calls_without_an_id_get_one_that_no_other_call_has_before_their_intent_is_on_record(chat):
    journal, scaffold = RecordingJournal(), MakesCalls()
    episode = await play(chat, ScriptedEngine(chat, in_turn(ANSWER)), scaffold, journal=journal)
    name = episode.episode_id
    made = [f"{name}/0.s0", "mine", f"{name}/0.s1", f"{name}/1.s2"]
    assert [event for event in journal.events if event.startswith("intent")] == [f"intent {one}" for one in made]
    assert scaffold.answered == made[:3]
    assert [effect.call.id for effect in episode.turns[0].effects] == made[:3]


class Measures:
    """Notes how long the conversation is before and behind every reply, and once it has been replaced."""

    async def run(self, context: ScaffoldContext) -> None:
        opening = await context.start()
        self.sizes = [context.context_tokens]
        reply = await context.generate(opening.messages, opening.tools)
        self.sizes.append(context.context_tokens)
        result = await context.step(reply)
        self.sizes.append(context.context_tokens)
        await context.generate(result.messages, opening.tools)
        self.sizes.append(context.agent("agent").context_tokens)
        await context.rewrite(opening.messages)
        self.sizes.append(context.context_tokens)
        await context.step(ANSWER)


async def test_the_context_has_the_tokens_of_what_the_agent_was_told_and_has_said(chat):
    scaffold = Measures()
    episode = await play(chat, AbortingEngine(chat, in_turn(CALL, ANSWER), cuts=[2]), scaffold)
    assert episode.failure is None
    opening, call, result, answer, again, last = (len(node.token_ids) for node in episode.nodes)
    first = opening + call
    assert scaffold.sizes == [0, first, first, first + result + answer, again + last]


async def test_a_scaffold_that_acts_before_any_reply_fails_its_episode_and_says_why(chat):
    class Hasty:
        async def run(self, context: ScaffoldContext) -> None:
            await context.start()
            await context.step(CALL)

    events: list[str] = []
    episode = await play(chat, ScriptedEngine(chat, in_turn(ANSWER)), Hasty(), journal=RecordingJournal(events))
    assert (episode.failure.boundary, episode.failure.kind) == (Boundary.SCAFFOLD, "no_reply")
    assert events == []
