"""A few facts, then questions about them, one a turn: short enough that a pretrained model learns it on a CPU.

An instruction-tuned model of 135 million parameters finds most answers, but says them in sentences and mixes up people;
what it learns is to answer as it was asked to. Held-out tasks have other people and other things.
"""

from agentrl.envs.definition import EnvironmentDefinition, Expert
from agentrl_environments.facts.environment import FactsEnvironment
from agentrl_environments.facts.experts import act_right
from agentrl_environments.facts.tasks import FactsOptions, sample_task

definition = EnvironmentDefinition(
    name="facts",
    description="A few facts, then questions about them, one a turn; the answer is one word.",
    sample_task=sample_task,
    create=FactsEnvironment,
    options=FactsOptions,
    experts={"expert": Expert("always right, in one word", act_right)},
    is_deterministic=True,
    placement="inline",  # a call compares two words
)
