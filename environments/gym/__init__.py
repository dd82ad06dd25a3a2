"""Games of Gymnasium's interface, played by text: Gymnasium's own by name, gem's by id, and what a function makes.

Gymnasium's games have numbered actions and states; the adapter names the former and writes the latter out. Games of
gem, and of functions, speak text already.
"""

from agentrl.envs.definition import EnvironmentDefinition, Expert
from agentrl_environments.gym.environment import GymEnvironment
from agentrl_environments.gym.experts import act_planned, can_plan
from agentrl_environments.gym.options import GymOptions
from agentrl_environments.gym.tasks import check_game, sample_task

definition = EnvironmentDefinition(
    name="gym",
    description="Games of Gymnasium (FrozenLake, Taxi), of gem, or of a function of yours, by text.",
    sample_task=sample_task,
    create=GymEnvironment,
    options=GymOptions,
    experts={"gold": Expert("plans by the game's own table of transitions", act_planned, can_plan)},
    is_deterministic=True,
    num_tasks=check_game,
)
