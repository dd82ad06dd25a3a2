"""Entries of the size that real episodes have, for benchmarks of the journal."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from agentrl import codec
from agentrl.journal import entries as e
from agentrl.testing.builders import build_ticket
from agentrl.types.environment import Opening, Score, ScoreRecord, StepResult
from agentrl.types.episode import Agent, Effect, Node, SampledColumns, StopReason, Turn
from agentrl.types.generation import FinishReason
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.version import PolicyVersion, VersionSpan

POLICY = "main"
AGENTS = (Agent("agent", POLICY),)
_VERSION = PolicyVersion(0, 7)
_CALL = ToolCall("call-0", "query", {"sql": "SELECT name, count FROM orders WHERE count > 17"})
_OBSERVATION = Message(Role.TOOL, "ada, 17\nbob, 93\ncora, 45", tool_call_id=_CALL.id)


def turned(turn: int, sampled_tokens: int = 100, context_tokens: int = 30) -> e.TurnCommitted:
    """A complete reply with what lies between it and the last one."""
    draw = np.random.default_rng(turn)
    spans = (VersionSpan(_VERSION, 0, sampled_tokens),)
    logprobs = -draw.random(sampled_tokens, np.float32)
    ids = draw.integers(0, 150_000, context_tokens + sampled_tokens).astype(np.int32)
    context = Node(2 * turn, 2 * turn - 1 if turn else None, "agent", turn, ids[:context_tokens])
    sample = SampledColumns(logprobs, spans, spans)
    reply = Node(2 * turn + 1, 2 * turn, "agent", turn, ids[context_tokens:], sample)
    return e.TurnCommitted(
        1, Turn(turn, "agent", reply.index, (), 1.5), (context, reply), FinishReason.STOP, f"{turn:016x}"
    )


def intended(turn: int) -> e.Intended:
    """The tool call of a turn."""
    return e.Intended(1, turn, (Effect(f"0.{turn}", _CALL),))


def resulted(turn: int) -> e.StepResultRecorded:
    """What the tool answered."""
    effect = Effect(f"0.{turn}", _CALL, _OBSERVATION.content, 0.02)
    return e.StepResultRecorded(1, turn, (effect,), StepResult((_OBSERVATION,)), 0.02)


class EpisodeLoad:
    """The entries of episodes that differ in name only, packed as fast as names can be put before them."""

    def __init__(self, turns: int, sampled_tokens: int = 100) -> None:
        opening = e.EnvironmentStarted(1, Opening((Message(Role.USER, "how many orders does ada have?"),)))
        played: list[e.Entry] = [opening]
        for turn in range(turns):
            played += [turned(turn, sampled_tokens), intended(turn), resulted(turn)]
        verdict = ScoreRecord("verifier", Score(1.0, {"queries": float(turns)}))
        played += [e.Scored(1, verdict), e.Ended(1, StopReason.ANSWERED, None, 12.5)]
        self._bodies = [(e.NUMBERS[type(entry)], codec.encode(entry)) for entry in played]

    def entries(self, episode_id: str, group: int, member: int) -> Iterator[tuple[int, int, bytes]]:
        """Schema, kind and payload of every entry of one episode, in order."""
        yield e.pack(episode_id, e.Leased(build_ticket(episode_id, group, member), AGENTS, 1))
        key = e.episode_key(episode_id).to_bytes(8, "little")
        for kind, body in self._bodies:
            yield e.SCHEMA, kind, key + body


def step_entries(step: int, groups: tuple[tuple[int, tuple[str, ...]], ...]) -> list[e.Entry]:
    """What a step that trains these groups leaves in the journal."""
    before, after = PolicyVersion(0, step), PolicyVersion(0, step + 1)
    return [e.Taken(POLICY, before, groups), e.Stepped(POLICY, after, f"{step:016x}")]
