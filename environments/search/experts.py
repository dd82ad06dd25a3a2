"""Scripted players of the search environment: a ceiling, a teacher with bad habits, and a floor."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentrl.envs.authoring import call, say
from agentrl.envs.definition import Expert
from agentrl.types.message import Message, Role
from agentrl.types.task import Task
from agentrl_environments.invented import COMMON_WORDS
from agentrl_environments.search.tasks import Problem, SearchOptions, problem_of
from agentrl_environments.search.world import PEOPLE

CLUMSY_HABITS = {"clean": 0.25, "stop": 0.40, "whole": 0.25, "skip": 0.10}
"""How often the clumsy expert does what: follows the question to its end; answers with what the first document names;
searches for the whole question and reads whatever comes first; answers without any search."""


def act_clean(options: SearchOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """Search for each thing on the way, read its document, answer with what the last one says: always right."""
    return _follow(problem_of(options, task), messages)


def act_clumsy(options: SearchOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """Right format and sloppy procedure: right about 25 times in 100."""
    habit = rng.choices(list(CLUMSY_HABITS), list(CLUMSY_HABITS.values()))[0]
    problem = problem_of(options, task)
    turn = _num_replies(messages)
    if habit == "skip" or (habit == "whole" and turn == 2):
        return say("unknown")
    if habit == "whole":
        return call("search", query=problem.question) if turn == 0 else call("read", document_id=_first_id(messages))
    if habit == "stop" and turn == 2:
        return say(problem.path[1])
    return _follow(problem, messages)


def act_random(options: SearchOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """Calls and answers drawn without reading anything."""
    rng.seed(f"{rng.random()}-{_num_replies(messages)}")
    choice = rng.randrange(3)
    if choice == 0:
        return call("search", query=rng.choice(COMMON_WORDS))
    if choice == 1:
        return call("read", document_id=f"{rng.choice('abc')}{rng.randint(10, 99)}")
    return say(rng.choice([f"{rng.choice(PEOPLE)} {rng.choice(COMMON_WORDS)}", str(rng.randint(10, 99))]))


EXPERTS = {
    "expert": Expert("always right: searches and reads on to the end of the question", act_clean),
    "clumsy": Expert("right format, sloppy procedure; right about 25 in 100", act_clumsy),
    "random": Expert("random calls and answers; almost never right", act_random),
}


def _follow(problem: Problem, messages: Sequence[Message]) -> Message:
    turn = _num_replies(messages)
    if turn == 2 * len(problem.path):
        return say(problem.answer)
    name = problem.path[turn // 2]
    if turn % 2 == 0:
        return call("search", query=name)
    listed = (line.split(" ", 1) for line in messages[-1].content.splitlines())
    return call("read", document_id=next(document_id for document_id, title in listed if title == name))


def _first_id(messages: Sequence[Message]) -> str:
    return messages[-1].content.split(" ", 1)[0]


def _num_replies(messages: Sequence[Message]) -> int:
    return sum(message.role is Role.ASSISTANT for message in messages)
