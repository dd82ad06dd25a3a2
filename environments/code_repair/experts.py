"""Scripted players of the code repair environment: a ceiling, a teacher with bad habits, and floors."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentrl.envs.authoring import call, say
from agentrl.envs.definition import Expert
from agentrl.types.message import Message, Role
from agentrl.types.task import Task
from agentrl_environments.code_repair.tasks import FILE, CodeRepairOptions, problem_of

CLUMSY_HABITS = {"clean": 0.27, "keep": 0.38, "peek": 0.25, "skip": 0.10}
"""How often the clumsy expert does what: reads the file and mends it; reads it and writes it as it was; reads it and
says that it is mended; says so at once."""


def act_clean(options: CodeRepairOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """Read the file, write the right one, end: always right."""
    turn = _num_replies(messages)
    if turn == 0:
        return call("read", path=FILE)
    return call("write", path=FILE, content=problem_of(options, task).solution) if turn == 1 else say("done")


def act_clumsy(options: CodeRepairOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """Right format and sloppy work: right about 27 times in 100."""
    habit = rng.choices(list(CLUMSY_HABITS), list(CLUMSY_HABITS.values()))[0]
    turn = _num_replies(messages)
    if habit == "clean" or (habit in ("keep", "peek") and turn == 0):
        return act_clean(options, task, messages, rng)
    if habit == "keep" and turn == 1:
        return call("write", path=FILE, content=problem_of(options, task).module)
    return say("done")


def act_idle(options: CodeRepairOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """Do nothing."""
    return say("done")


def act_random(options: CodeRepairOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """Calls drawn without reading anything."""
    rng.seed(f"{rng.random()}-{_num_replies(messages)}")
    drawn = [say("done"), call("read", path=FILE), call("run_tests"), call("write", path=FILE, content="x = 1\n")]
    return rng.choice(drawn)


EXPERTS = {
    "expert": Expert("always right: reads, mends, says so", act_clean),
    "clumsy": Expert("right format, sloppy work; right about 27 in 100", act_clumsy),
    "idle": Expert("does nothing; never right", act_idle),
    "random": Expert("random calls; never right", act_random),
}


def _num_replies(messages: Sequence[Message]) -> int:
    return sum(message.role is Role.ASSISTANT for message in messages)
