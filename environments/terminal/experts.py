"""Scripted players of the terminal environment: a ceiling, a teacher with bad habits, and a floor."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentrl.envs.authoring import call, say
from agentrl.envs.definition import Expert
from agentrl.types.message import Message, Role
from agentrl.types.task import Task
from agentrl_environments.terminal.names import ENDINGS, STEMS
from agentrl_environments.terminal.tasks import Problem, TerminalOptions, build_problem

CLUMSY_HABITS = {"clean": 0.27, "assume": 0.38, "peek": 0.25, "skip": 0.10}
"""How often the clumsy expert does what: looks, acts and says so; acts on a file called ``data`` without looking; looks
and says that it has acted; says so at once."""


def act_clean(options: TerminalOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """List the files, run the right command, end: always right."""
    turn = _num_replies(messages)
    if turn == 0:
        return call("shell", command="ls")
    return call("shell", command=_problem(options, task).command) if turn == 1 else say("done")


def act_clumsy(options: TerminalOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """Right commands and sloppy procedure: right about 27 times in 100."""
    habit = rng.choices(list(CLUMSY_HABITS), list(CLUMSY_HABITS.values()))[0]
    turn = _num_replies(messages)
    if habit == "clean":
        return act_clean(options, task, messages, rng)
    if turn > 0 or habit == "skip":
        return say("done")
    return call("shell", command="ls" if habit == "peek" else _problem(options, task).command_on("data"))


def act_random(options: TerminalOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """Commands drawn without reading anything."""
    rng.seed(f"{rng.random()}-{_num_replies(messages)}")
    if rng.randrange(3) == 0:
        return say("done")
    one, other = (f"{rng.choice(STEMS)}.{rng.choice(ENDINGS)}" for _ in range(2))
    return call("shell", command=rng.choice(["ls", f"mv {one} {other}", f"cp {one} {other}", f"rm {one}"]))


EXPERTS = {
    "expert": Expert("always right: looks, acts, says so", act_clean),
    "clumsy": Expert("right commands, sloppy procedure; right about 27 in 100", act_clumsy),
    "random": Expert("random commands; almost never right", act_random),
}


def _problem(options: TerminalOptions, task: Task) -> Problem:
    return build_problem(options, task.payload["seed"], task.split)


def _num_replies(messages: Sequence[Message]) -> int:
    return sum(message.role is Role.ASSISTANT for message in messages)
