"""Scripted players of the SQL environment: a ceiling, a teacher with bad habits, and a floor."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentrl.envs.definition import Expert
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.task import Task
from agentrl_environments.sql.names import FIRST_WORDS, PEOPLE
from agentrl_environments.sql.tasks import Problem, SqlOptions, build_problem

CLUMSY_HABITS = {"clean": 0.23, "assume": 0.41, "peek": 0.26, "skip": 0.10}
"""How often the clumsy expert does what: looks, queries and answers; assumes a table called ``data``
without looking; reads the first row instead of asking the question; answers without any query."""


def act_clean(options: SqlOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """Look at the schema, run the right query, answer with its result: always right."""
    problem = _problem(options, task)
    turn = _num_replies(messages)
    if turn == 0:
        return _call("schema")
    if turn == 1:
        return _call("query", problem.query)
    return _answer(messages[-1].content)


def act_clumsy(options: SqlOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """Right format and sloppy procedure: right about 28 times in 100."""
    habit = rng.choices(list(CLUMSY_HABITS), list(CLUMSY_HABITS.values()))[0]
    problem = _problem(options, task)
    turn = _num_replies(messages)
    if habit == "clean":
        return act_clean(options, task, messages, rng)
    if habit == "skip" or (habit == "assume" and turn == 1):
        return _answer("unknown")
    if habit == "assume":
        return _call("query", problem.query_on("data"))
    if turn == 0:
        return _call("schema")
    if turn == 1:
        return _call("query", _first_row(problem))
    return _answer(messages[-1].content)


def act_random(options: SqlOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """Calls and answers drawn without reading anything."""
    rng.seed(f"{rng.random()}-{_num_replies(messages)}")
    choice = rng.randrange(3)
    if choice == 0:
        return _call("schema")
    if choice == 1:
        return _call("query", f"SELECT {rng.choice(FIRST_WORDS)} FROM {rng.choice(FIRST_WORDS)}")
    return _answer(rng.choice([rng.choice(PEOPLE), str(rng.randint(0, 99))]))


EXPERTS = {
    "expert": Expert("always right: schema, query, answer", act_clean),
    "clumsy": Expert("right format, sloppy procedure; right about 28 in 100", act_clumsy),
    "random": Expert("random calls and answers; almost never right", act_random),
}


def _problem(options: SqlOptions, task: Task) -> Problem:
    return build_problem(options, task.payload["seed"], task.split)


def _first_row(problem: Problem) -> str:
    wanted = "name" if problem.kind.answers_with_name else problem.column
    return f"SELECT {wanted} FROM {problem.table} LIMIT 1"


def _num_replies(messages: Sequence[Message]) -> int:
    return sum(message.role is Role.ASSISTANT for message in messages)


def _call(name: str, sql: str | None = None) -> Message:
    arguments = {} if sql is None else {"sql": sql}
    return Message(Role.ASSISTANT, tool_calls=(ToolCall("", name, arguments),))


def _answer(text: str) -> Message:
    return Message(Role.ASSISTANT, text)
