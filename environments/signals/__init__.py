"""A referential game of two agents: a speaker sees an object, a listener is to name it by the speaker's word alone.

No word means anything at first: speaker and listener, each a policy of its own or both the same, have to come to an
understanding. The game is small enough that models of a few ten thousand parameters do.
"""

from agentrl.envs.definition import EnvironmentDefinition, Expert
from agentrl_environments.signals.environment import LISTENER, SPEAKER, SignalsEnvironment
from agentrl_environments.signals.experts import act_fluent, act_hesitant
from agentrl_environments.signals.tasks import OBJECTS, WORDS, SignalsOptions, sample_task

definition = EnvironmentDefinition(
    name="signals",
    description="A speaker sees an object and says a word; a listener hears it and names one of a few objects.",
    sample_task=sample_task,
    create=SignalsEnvironment,
    options=SignalsOptions,
    experts={
        "fluent": Expert("one word for each object, always right", act_fluent),
        "hesitant": Expert("as fluent every other time, else anything that is allowed", act_hesitant),
    },
    agents=(SPEAKER, LISTENER),
    words=(*OBJECTS, *WORDS),
    is_deterministic=True,
    placement="inline",  # a call compares two words
)
