"""verifiers' own TrainClient against the gateway: its trace holds the very tokens that our episode holds."""

from __future__ import annotations

import numpy as np

from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.tiny import tiny_chat
from agentrl.tokens.chat import ChatFormat
from agentrl.types.generation import FinishReason, Generation, GenerationRequest
from agentrl.types.message import Message, Role
from agentrl.types.version import VersionSpan
from tests.adapters.verifiers_player import TURNS, Recorded, play_rollouts, verifiers_player
from tests.unit.gateway.gateway_parts import ANSWER, CALL

PIECE_TOKENS = 4
SAID = (CALL, ANSWER, Message(Role.ASSISTANT, "", CALL.tool_calls * 2), CALL)


class Interrupted(ScriptedEngine):
    """Says a message a turn, a few tokens at a time: an abort and a newer version come behind each piece."""

    def __init__(self, chat: ChatFormat) -> None:
        super().__init__(chat, lambda session, messages: ANSWER)
        self._opening = chat.tokenizer.encode("<|im_start|>assistant\n")
        self.texts: list[str] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        """The next piece of the reply that the prompt's last turn has begun."""
        ids, size = request.prompt_ids.tolist(), len(self._opening)
        starts = [n + size for n in range(len(ids) - size + 1) if ids[n : n + size] == self._opening]
        self.texts.append(self._chat.tokenizer.decode(ids))
        rest = self._chat.complete(SAID[len(starts) - 1])[len(ids) - starts[-1] :]
        piece = rest[: min(PIECE_TOKENS, request.max_new_tokens)]
        spans = (VersionSpan(self.version, 0, len(piece)),)
        is_over = len(piece) == len(rest)
        self.version = self.version if is_over else self.version.next()
        logprobs = -np.arange(len(ids), len(ids) + len(piece), dtype=np.float32) / 7
        return Generation(piece, logprobs, spans, spans, FinishReason.STOP if is_over else FinishReason.ABORT)


async def test_tools_and_replies_in_pieces_are_one_branch_of_the_same_tokens_on_both_sides(tiny_model, tmp_path):
    """Its harness answers calls with results, and everything else with another question."""
    chat = tiny_chat(tiny_model)
    engines = [Interrupted(chat) for _ in range(3)]
    async with verifiers_player(tiny_model, tmp_path / "log") as player:
        rollouts = await play_rollouts(player, chat, [Recorded(engine) for engine in engines])
    for rollout, engine in zip(rollouts, engines, strict=True):
        rollout.check()
        assert all(turn.aborts > 0 for turn in rollout.episode.turns)
        assert ["result" in text for text in engine.texts].count(True) > TURNS
        assert {name for name, number in rollout.episode.counts.items() if number} >= {"overrides_temperature"}
