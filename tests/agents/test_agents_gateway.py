"""Each agent plays an episode: in a sandbox, against the real gateway, with a scripted policy behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.gateway.starting import LazyGateway
from agentrl.protocols import Engine
from agentrl.sandbox.client import KeeperHost
from agentrl.testing.scripted import AbortingEngine, Script, ScriptedEngine
from agentrl.testing.tiny import tiny_chat
from agentrl.tokens.chat import ChatFormat
from agentrl.types.episode import Episode, StopReason
from agentrl.types.generation import Generation, GenerationRequest
from agentrl.types.trajectory import build_trajectories
from tests.agents.cases import AGENTS, CLAUDE_CODE, CODEX, AgentCase
from tests.agents.episodes import play_episode
from tests.agents.policies import POLICIES, SHARING
from tests.agents.writing import ONE_FILE, TWO_FILES

pytestmark = pytest.mark.timeout(600)


class KeepingEngine(ScriptedEngine):
    """Keeps the tokens that it gave."""

    def __init__(self, chat: ChatFormat, script: Script) -> None:
        super().__init__(chat, script)
        self.delivered: list[int] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        generation = await super().generate(request)
        self.delivered += generation.token_ids.tolist()
        return generation


async def play(case: AgentCase, engine: Engine, chat: ChatFormat, files: list[tuple[str, str]]) -> Episode:
    gateway = LazyGateway()
    try:
        return await play_episode(case, engine, chat, files, gateway)
    finally:
        await gateway.close()


@pytest.mark.parametrize("case", AGENTS, ids=lambda case: case.name)
async def test_an_agent_plays_an_episode_that_is_one_branch_of_the_tokens_that_were_delivered(
    case: AgentCase, host: KeeperHost, tiny_model: Path
) -> None:
    chat = tiny_chat(tiny_model)
    engine = AbortingEngine(chat, POLICIES[case.name], cuts=[3, 0, 2, 5])
    episode = await play(case, engine, chat, ONE_FILE)
    assert (episode.failure, episode.reward, episode.stop_reason) == (None, 1.0, StopReason.ANSWERED)
    (trajectory,) = build_trajectories(episode)
    assert trajectory.token_ids[trajectory.sampled].tolist() == engine.delivered
    assert (len(episode.turns), episode.counts["calls"]) == (4, 4)


@pytest.mark.parametrize("case", [CODEX, CLAUDE_CODE], ids=lambda case: case.name)
async def test_sub_agents_are_branches_of_the_episode(case: AgentCase, host: KeeperHost, tiny_model: Path) -> None:
    chat = tiny_chat(tiny_model)
    engine = KeepingEngine(chat, POLICIES[case.name])
    episode = await play(case, engine, chat, TWO_FILES)
    assert (episode.failure, episode.reward, episode.stop_reason) == (None, 1.0, StopReason.ANSWERED)
    trajectories = build_trajectories(episode)
    texts = [chat.tokenizer.decode(t.token_ids[t.sampled].tolist()) for t in trajectories]
    assert sorted((SHARING in text, "a.txt" in text, "b.txt" in text) for text in texts) == [
        (False, False, True),
        (False, True, False),
        (True, True, True),
    ]
    sampled = sorted(token for t in trajectories for token in t.token_ids[t.sampled].tolist())
    assert sampled == sorted(engine.delivered)
    assert episode.counts["calls"] == len(episode.turns)
