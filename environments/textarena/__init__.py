"""Games of TextArena, by their id: of one player, or of two agents that meet in one episode.

The package itself is imported where episodes are played and nowhere else. What an agent reads is the game's own text,
each part of it once; TextArena's wrappers that repeat it at every turn are passed over, those that put brackets around
an action are not.
"""

from agentrl.envs.definition import EnvironmentDefinition, Expert
from agentrl_environments.textarena.environment import TextArenaEnvironment
from agentrl_environments.textarena.experts import act_gold, knows
from agentrl_environments.textarena.games import AGENTS, TextArenaOptions, check_games, sample_task

definition = EnvironmentDefinition(
    name="textarena",
    description="Games of TextArena by their id, of one player or of two.",
    sample_task=sample_task,
    create=TextArenaEnvironment,
    options=TextArenaOptions,
    experts={"gold": Expert("best play of GuessTheNumber and of Nim; it knows no other", act_gold, knows)},
    agents=AGENTS,
    is_deterministic=True,
    num_tasks=check_games,
)
