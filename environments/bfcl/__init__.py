"""The multi-turn tasks of the Berkeley Function Calling Leaderboard: a user asks for several things in turn.

Each of the 800 tasks has a small world of stateful APIs (files, tickets, trading, travel and others), which the package
``bfcl-eval`` brings. An episode is right if after every turn of the user the world is as the reference calls leave it,
and the policy has read what they would have read. What a policy writes is never evaluated: calls go to methods by name.
"""

from agentrl.envs.definition import EnvironmentDefinition, Expert
from agentrl_environments.bfcl.environment import BfclEnvironment
from agentrl_environments.bfcl.experts import act_gold
from agentrl_environments.bfcl.tasks import BfclOptions, num_tasks, sample_task

definition = EnvironmentDefinition(
    name="bfcl",
    description="Multi-turn tasks of BFCL: stateful APIs, a user who asks for one thing after another.",
    sample_task=sample_task,
    create=BfclEnvironment,
    options=BfclOptions,
    experts={"gold": Expert("the reference calls: always right", act_gold)},
    is_deterministic=True,
    num_tasks=num_tasks,
)
