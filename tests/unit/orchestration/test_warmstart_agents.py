from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.envs.definition import load_environment
from agentrl.envs.inline import InlineHost
from agentrl.orchestration.transcripts import Teacher
from agentrl.orchestration.warmstart import WarmStart
from agentrl.orchestration.warmstart_config import LessonConfig, load_warmstart_config
from agentrl.testing.tiny import tiny_chat
from agentrl.types.episode import Episode
from agentrl.types.errors import ConfigError
from agentrl.types.task import Limits
from agentrl_environments.signals.tasks import WORDS
from agentrl_scaffolds.turn_taking import TurnTaking

RECIPE = Path(__file__).parents[3] / "environments" / "signals" / "speaker.toml"
# The tests' tokenizer spells words in several tokens, and its format has more to say.
ROOMY = (
    "limits.max_context_tokens=512",
    "limits.max_reply_tokens=96",
    "model.shape.context_tokens=512",
    "chat.renderer=qwen3",
)


async def fluent_episodes(model: Path, num_episodes: int) -> list[Episode]:
    definition = load_environment("signals")
    options = definition.parse_options({})
    host, limits = InlineHost(definition, options, 5.0), Limits(8, 4096, 512, 5.0, 60.0)
    teacher = Teacher(definition, options, host, TurnTaking(), limits)
    return await teacher.play("fluent", tiny_chat(model), range(num_episodes), seed=0)


async def test_an_expert_acts_as_every_agent_each_in_its_own_conversation(tiny_model):
    chat = tiny_chat(tiny_model)
    for episode in await fluent_episodes(tiny_model, 8):
        target = episode.ticket.task.payload["target"]
        assert episode.reward == 1.0
        assert [turn.agent for turn in episode.turns] == ["speaker", "listener"]
        asked, said, heard, named = (chat.tokenizer.decode(node.token_ids.tolist()) for node in episode.nodes)
        assert target in asked
        assert said.split("<|im_end|>")[0] in heard
        assert target in named
        assert [node.parent for node in episode.nodes] == [None, 0, None, 2], "neither sees the other's conversation"


@pytest.mark.parametrize("agent", ["speaker", "listener", None])
async def test_a_policy_learns_the_turns_of_the_agent_that_it_will_act_as(tiny_model, tmp_path, agent):
    chat, told = tiny_chat(tiny_model), []
    for sequence in await warm_start(tmp_path)._transcripts(lesson(agent), chat, range(4)):
        said = chat.tokenizer.decode(sequence.token_ids[sequence.selected].tolist())
        told.append("speaker" if said.split("<|im_end|>")[0] in WORDS else "listener")
    assert told == ([agent] * 4 if agent else ["speaker", "listener"] * 4)


def test_an_agent_that_does_not_act_cannot_be_learned_from(tmp_path):
    with pytest.raises(ConfigError, match="no agent 'judge' acts in environment 'signals'; it names speaker, listener"):
        warm_start(tmp_path, "lessons=[{expert='fluent', agent='judge'}]")


def lesson(agent: str | None) -> LessonConfig:
    return LessonConfig(expert="fluent", agent=agent)


def warm_start(folder: Path, *overrides: str) -> WarmStart:
    observer = SimpleNamespace(on_phase=lambda text: None, on_progress=lambda done, total, text: None)
    return WarmStart(load_warmstart_config(RECIPE, [f"output={folder / 'model'}", *ROOMY, *overrides]), observer)
