"""A compacted episode beside the linear one of the same replies, each against losses worked by hand from texts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trainer_reference import assert_moved_by, batch_of, plain_gradient, plain_logprobs, take_step

from agentrl.algorithms.config import AlgorithmConfig, NoCorrectionConfig
from agentrl.envs.inline import InlineHost
from agentrl.protocols import Scaffold
from agentrl.rollouts.episode_log import NoJournal
from agentrl.rollouts.runner import EpisodeRunner, Player
from agentrl.testing.builders import build_ticket
from agentrl.testing.environments import FaultyOptions, faulty
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.tiny import tiny_chat
from agentrl.tokens.chat import ChatFormat
from agentrl.trainer.selection import select_sequences
from agentrl.types.batch import TrainBatch
from agentrl.types.episode import Episode
from agentrl.types.generation import Sampling
from agentrl.types.message import Message, Role, ToolCall, ToolSpec
from agentrl.types.task import Limits
from agentrl.types.trajectory import build_trajectories
from agentrl_scaffolds.compaction import _INTRODUCTION, _REQUEST, Compaction
from agentrl_scaffolds.tool_calling import ToolCalling

pytestmark = pytest.mark.usefixtures("process_group")

TOOLS = (ToolSpec("query", "Query."),)
LIMITS = Limits(max_turns=8, max_context_tokens=4096, max_reply_tokens=512, tool_s=60.0, total_s=300.0)
QUESTION = Message(Role.USER, "count")
CALL = Message(Role.ASSISTANT, "", (ToolCall("", "query", {"from": "name"}),))
RESULT = Message(Role.TOOL, "{'from': 'name'}", tool_call_id="call")
SUMMARY = Message(Role.ASSISTANT, "I asked for the name.")
TOLD = Message(Role.USER, f"{_INTRODUCTION}I asked for the name.")
ANSWER = Message(Role.ASSISTANT, "the count is 93")
HALF = 0.5  # the advantage of rewards 1 and 0 in a group of two is +0.5 and -0.5


@pytest.fixture(scope="module")
def chat(tiny_model) -> ChatFormat:
    return tiny_chat(tiny_model)


def script(session: str, messages: list[Message]) -> Message:
    last = messages[-1]
    if last.content == _REQUEST.content:
        return SUMMARY
    return CALL if last == QUESTION else ANSWER


async def play(chat: ChatFormat, scaffold: Scaffold) -> Episode:
    player = Player("main", ScriptedEngine(chat, script), chat, Sampling())
    host = InlineHost(faulty, FaultyOptions(), LIMITS.tool_s)
    runner = EpisodeRunner({"agent": player}, scaffold, host, None, NoJournal(), LIMITS)

    async def nothing() -> None:
        return

    return await runner.run(runner.open(build_ticket()), nothing)


@pytest.fixture
async def batch(chat) -> TrainBatch:
    """Two episodes of one task: the compacted one is rewarded, the linear one is not.

    A script drew the tokens and not the network, so they count as those of older weights.
    """
    compacted = await play(chat, Compaction(compact_at_tokens=1))
    linear = await play(chat, ToolCalling())
    return batch_of([[(1.0, build_trajectories(compacted)), (0.0, build_trajectories(linear))]], staleness=1)


def reply_logprob(network, chat: ChatFormat, before: list[Message], reply: Message) -> torch.Tensor:
    """Log-probability of a whole reply behind a conversation, rendered anew from its messages."""
    prompt, ids = chat.open(before, TOOLS), chat.complete(reply)
    whole = np.concatenate([prompt, ids])
    return plain_logprobs(network, whole, np.arange(len(prompt), len(whole))).sum()


@pytest.mark.parametrize("aggregation", ["token", "episode"])
async def test_a_compacted_episode_gives_the_loss_of_its_replies_each_once(
    aggregation, batch, chat, tiny_model, network
):
    history = [QUESTION, CALL, RESULT]
    call = reply_logprob(network, chat, [QUESTION], CALL)
    summary = reply_logprob(network, chat, [*history, _REQUEST], SUMMARY)
    answer = reply_logprob(network, chat, [QUESTION, TOLD], ANSWER)
    linear_answer = reply_logprob(network, chat, history, ANSWER)
    sizes = {name: len(chat.complete(reply)) for name, reply in (("c", CALL), ("s", SUMMARY), ("a", ANSWER))}
    compacted, linear = sum(sizes.values()), sizes["c"] + sizes["a"]
    denominators = {"token": (compacted + linear,) * 2, "episode": (2 * compacted, 2 * linear)}[aggregation]
    objective = HALF * (call + summary + answer) / denominators[0] - HALF * (call + linear_answer) / denominators[1]
    algorithm = AlgorithmConfig(advantage="dr_grpo", aggregation=aggregation, correction=NoCorrectionConfig())
    _, update = take_step(tiny_model, batch, algorithm)
    assert_moved_by(update, plain_gradient(network, -objective))


async def test_the_scales_of_both_episodes_are_those_worked_by_hand(batch, chat):
    """Under ``episode`` each has half of the loss, however many branches it has; a token of it an equal part."""
    algorithm = AlgorithmConfig(advantage="dr_grpo", aggregation="episode", correction=NoCorrectionConfig())
    first, second, linear = select_sequences(batch, algorithm)
    drawn = [len(chat.complete(reply)) for reply in (CALL, SUMMARY, ANSWER)]
    assert [len(first.selected), len(second.selected)] == [drawn[0] + drawn[1], drawn[2]]
    assert len(linear.selected) == drawn[0] + drawn[2]
    part = 1 / (2 * sum(drawn))
    assert np.concatenate([first.scales, second.scales]) == pytest.approx(part)
    assert linear.scales == pytest.approx(1 / (2 * (drawn[0] + drawn[2])))
    assert set(first.advantages.tolist()) == set(second.advantages.tolist()) == {HALF}
    assert set(linear.advantages.tolist()) == {-HALF}
