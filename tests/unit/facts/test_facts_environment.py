from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.types.message import Message, Role
from agentrl.types.task import Split
from agentrl_environments.facts.environment import FactsEnvironment
from agentrl_environments.facts.experts import act_right
from agentrl_environments.facts.tasks import FactsOptions, build_problem, sample_task

SPLITS = st.sampled_from(list(Split))


async def play(options: FactsOptions, answers: list[str], ordinal: int = 3) -> float | None:
    environment = FactsEnvironment(options, sample_task(options, Split.TRAIN, ordinal, 0))
    await environment.start()
    for number, answer in enumerate(answers, start=1):
        result = await environment.step(Message(Role.ASSISTANT, answer))
        assert result.is_done == (number == options.num_questions)
        assert bool(result.messages) != result.is_done
    return (await environment.score()).reward


def problem_of(options: FactsOptions, ordinal: int = 3):
    task = sample_task(options, Split.TRAIN, ordinal, 0)
    return build_problem(options, task.payload["seed"], Split.TRAIN)


@given(SPLITS, st.integers(0, 200), st.integers(0, 3), st.integers(2, 8))
def test_every_answer_can_be_read_from_the_facts_and_no_other_fits(split, ordinal, seed, num_people):
    options = FactsOptions(num_people=num_people, num_questions=3)
    problem = build_problem(options, sample_task(options, split, ordinal, seed).payload["seed"], split)
    told = dict(re.findall(r"(\w+) has (\d+) \w+\.", problem.facts))
    assert len(told) == len(set(told.values())) == num_people
    for question in problem.questions:
        if who := re.fullmatch(r"How many \w+ does (\w+) have\?", question.text):
            assert question.answer == told[who[1]]
        else:
            number = re.fullmatch(r"Who has (\d+) \w+\?", question.text)[1]
            assert told[question.answer] == number


def test_the_splits_share_no_person_and_no_thing():
    words = {}
    for split in Split:
        options = FactsOptions()
        problems = [
            build_problem(options, sample_task(options, split, n, 0).payload["seed"], split) for n in range(300)
        ]
        facts = " ".join(problem.facts for problem in problems)
        words[split] = set(re.findall(r"[A-Za-z]+", facts)) - {"has"}
    assert not words[Split.TRAIN] & words[Split.HELDOUT]


async def test_the_reward_is_the_share_of_questions_answered_with_the_one_right_word():
    options = FactsOptions()
    first, second = (question.answer for question in problem_of(options).questions)
    assert await play(options, [first, second]) == 1.0
    assert await play(options, [f" {first.upper()}. ", "nobody"]) == 0.5
    assert await play(options, [f"The answer is {first}.", f"{second} {second}"]) == 0.0
    assert await play(options, [first]) == 0.5, "what was not reached counts as wrong"


@pytest.mark.parametrize("num_questions", [1, 4])
async def test_the_expert_is_always_right(num_questions):
    options = FactsOptions(num_questions=num_questions)
    task = sample_task(options, Split.TRAIN, 5, 0)
    environment = FactsEnvironment(options, task)
    messages = list((await environment.start()).messages)
    is_done = False
    while not is_done:
        messages.append(act_right(options, task, messages, random.Random(0)))
        result = await environment.step(messages[-1])
        messages += result.messages
        is_done = result.is_done
    assert (await environment.score()).reward == 1.0
