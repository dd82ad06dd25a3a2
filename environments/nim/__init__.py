"""Nim, a game of two agents: they take objects from piles in turn, and who takes the last one wins.

Small enough that a model of half a million parameters, which knows no more than which moves are allowed, learns by play
against a frozen copy of itself to win from positions that it never began from. Right play is known: leave piles whose
exclusive or is zero.
"""

from agentrl.envs.definition import EnvironmentDefinition, Expert
from agentrl_environments.nim.environment import FIRST, SECOND, NimEnvironment
from agentrl_environments.nim.experts import act_beginner, act_gold
from agentrl_environments.nim.tasks import MAX_OBJECTS, PILES, NimOptions, sample_task

definition = EnvironmentDefinition(
    name="nim",
    description="Nim: two agents take objects from piles in turn, and who takes the last one wins.",
    sample_task=sample_task,
    create=NimEnvironment,
    options=NimOptions,
    experts={
        "gold": Expert("right play: it wins every game that it begins", act_gold),
        "beginner": Expert("any move that is allowed", act_beginner),
    },
    agents=(FIRST, SECOND),
    words=(*PILES, *(str(number) for number in range(MAX_OBJECTS + 1))),
    is_deterministic=True,
    placement="inline",  # a call compares a few numbers
)
