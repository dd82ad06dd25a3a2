"""Questions of reasoning-gym's generators, endless and of one turn, judged by the generator itself.

Its judges know answers that are right in several ways, so that answers are never compared as text here.
"""

from agentrl.envs.definition import EnvironmentDefinition, Expert
from agentrl_environments.reasoning_gym.environment import ReasoningGymEnvironment, act_right, can_answer
from agentrl_environments.reasoning_gym.tasks import ReasoningGymOptions, check_generators, sample_task

definition = EnvironmentDefinition(
    name="reasoning_gym",
    description="Questions of reasoning-gym's generators, one or a mix, judged by the generator.",
    sample_task=sample_task,
    create=ReasoningGymEnvironment,
    options=ReasoningGymOptions,
    experts={"gold": Expert("gives the generator's own answer", act_right, can_answer)},
    is_deterministic=True,
    num_tasks=check_generators,
)
