"""Environments of verifiers: their own code plays an episode, and each reply that it asks for is the policy's.

verifiers runs in the environment's process, from the task to the rewards, with its own client for training. That client
renders the conversation and sends token ids to the run's gateway, which answers with the ids that the engine drew: the
trace of verifiers and the episode of the run hold the same tokens. Versions 0.4 and 0.3 exclude each other, and so are
two environments, each with a Python that has one.
"""

from agentrl.envs.definition import EnvironmentDefinition
from agentrl_environments.verifiers.environment import VerifiersEnvironment
from agentrl_environments.verifiers.legacy import legacy_rollouts_of
from agentrl_environments.verifiers.options import LegacyOptions, VerifiersOptions
from agentrl_environments.verifiers.tasks import num_training_tasks, sample_task
from agentrl_environments.verifiers.taskset import rollouts_of

definition = EnvironmentDefinition(
    name="verifiers",
    description="Tasksets of verifiers 0.4, played by its own code; scaffold own_program.",
    sample_task=lambda options, split, ordinal, seed: sample_task(
        "verifiers", rollouts_of(options), split, ordinal, options.heldout_every
    ),
    create=lambda options, task: VerifiersEnvironment(rollouts_of(options), task),
    options=VerifiersOptions,
    num_tasks=lambda options: num_training_tasks(rollouts_of(options), options.heldout_every),
    has_program=True,
)

legacy_definition = EnvironmentDefinition(
    name="verifiers_v0",
    description="Environments of verifiers 0.3 (load_environment), played by their own code; scaffold own_program.",
    sample_task=lambda options, split, ordinal, seed: sample_task(
        "verifiers_v0", legacy_rollouts_of(options), split, ordinal, options.heldout_every
    ),
    create=lambda options, task: VerifiersEnvironment(legacy_rollouts_of(options), task),
    options=LegacyOptions,
    num_tasks=lambda options: num_training_tasks(legacy_rollouts_of(options), options.heldout_every),
    has_program=True,
)
