"""Text adventures that TextWorld generates: rooms, things, and a quest that a seed makes.

The platform sees commands and answers; what scores is the game's own affair.
"""

from agentrl.envs.definition import EnvironmentDefinition, Expert
from agentrl_environments.textworld.environment import TextWorldEnvironment, act_by_walkthrough
from agentrl_environments.textworld.games import TextWorldOptions, check_package, sample_task

definition = EnvironmentDefinition(
    name="textworld",
    description="Text adventures that TextWorld generates; points over all points are the reward.",
    sample_task=sample_task,
    create=TextWorldEnvironment,
    options=TextWorldOptions,
    experts={"gold": Expert("follows the game's own walk-through", act_by_walkthrough)},
    is_deterministic=True,
    num_tasks=check_package,
)
