from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.types.message import Message, Role
from agentrl.types.task import Split, Task
from agentrl_environments.signals.environment import LISTENER, SPEAKER, SignalsEnvironment
from agentrl_environments.signals.experts import act_fluent, act_hesitant
from agentrl_environments.signals.tasks import OBJECTS, WORDS, SignalsOptions, sample_task

GAME = Task("signals", Split.TRAIN, 0, {"target": "crow", "candidates": ["drum", "crow", "egg"]})


async def played(options: SignalsOptions, said: str, named: str, task: Task = GAME) -> SignalsEnvironment:
    environment = SignalsEnvironment(options, task)
    assert (await environment.start()).agent == SPEAKER
    result = await environment.step(Message(Role.ASSISTANT, said))
    assert (result.agent, result.is_done) == (LISTENER, False)
    assert (await environment.step(Message(Role.ASSISTANT, named))).is_done
    return environment


async def test_the_speaker_sees_the_object_and_the_listener_the_message_and_what_it_may_choose_from():
    environment = SignalsEnvironment(SignalsOptions(), GAME)
    assert [message.content for message in (await environment.start()).messages] == ["crow"]
    heard = await environment.step(Message(Role.ASSISTANT, " ba "))
    assert [message.content for message in heard.messages] == ["ba: drum crow egg"]


@pytest.mark.parametrize(
    ("named", "reward"), [("crow", 1.0), (" crow", 1.0), ("egg", 0.0), ("crow egg", 0.0), ("", 0.0)]
)
async def test_both_are_rewarded_if_the_listener_names_the_object_and_nothing_else(named, reward):
    score = await (await played(SignalsOptions(), "ba", named)).score()
    assert (score.reward, score.agent_rewards) == (reward, {})


async def test_words_behind_the_first_cost_the_speaker_alone():
    score = await (await played(SignalsOptions(word_cost=0.25), "ba di fo", "crow")).score()
    assert score.agent_rewards == {SPEAKER: 0.5, LISTENER: 1.0}


async def test_a_game_that_ended_before_the_listener_spoke_is_worth_nothing():
    environment = SignalsEnvironment(SignalsOptions(), GAME)
    await environment.start()
    assert (await environment.score()).reward == 0.0


@given(st.integers(0, 500), st.integers(0, 3), st.integers(2, len(OBJECTS)))
def test_no_heldout_game_is_a_training_game_and_the_object_is_among_the_candidates(ordinal, seed, num_objects):
    options = SignalsOptions(num_objects=num_objects, num_candidates=2)
    training = {str(sample_task(options, Split.TRAIN, n, seed).payload) for n in range(60)}
    task = sample_task(options, Split.HELDOUT, ordinal, seed)
    assert str(task.payload) not in training
    assert task.payload["target"] in task.payload["candidates"]
    assert set(task.payload["candidates"]) <= set(OBJECTS[:num_objects])


def test_more_candidates_than_objects_are_refused():
    with pytest.raises(ValidationError, match="num_candidates 4 is more than num_objects 3"):
        SignalsOptions(num_objects=3, num_candidates=4)


async def success_of(act, num_games: int = 300) -> float:
    options, found = SignalsOptions(), 0.0
    for ordinal in range(num_games):
        task = sample_task(options, Split.HELDOUT, ordinal, 0)
        environment = SignalsEnvironment(options, task)
        messages, is_done = (await environment.start()).messages, False
        while not is_done:
            result = await environment.step(act(options, task, messages, random.Random(f"{ordinal}/{messages}")))
            messages, is_done = result.messages, result.is_done
        found += (await environment.score()).reward
    return found / num_games


async def test_the_fluent_expert_is_always_right_and_the_hesitant_one_between_it_and_chance():
    assert await success_of(act_fluent) == 1.0
    assert 1 / 3 < await success_of(act_hesitant) < 0.65


def test_the_fluent_expert_has_a_word_for_each_object():
    options = SignalsOptions()
    tasks = [Task("signals", Split.TRAIN, 0, {"target": name, "candidates": [name]}) for name in OBJECTS]
    said = [act_fluent(options, t, [Message(Role.USER, t.payload["target"])], random.Random(0)).content for t in tasks]
    assert sorted(said) == sorted(WORDS)
