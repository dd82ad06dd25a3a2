"""Questions over a corpus with a full-text index: search, read, go on with what was read, answer.

Answers need two or three documents, each of which only the one before it names. See README.md beside this file.
"""

from agentrl.envs.definition import EnvironmentDefinition
from agentrl_environments.invented import COMMON_WORDS
from agentrl_environments.search.environment import SearchEnvironment
from agentrl_environments.search.experts import EXPERTS
from agentrl_environments.search.tasks import SearchOptions, sample_task
from agentrl_environments.search.world import BOOKS, FIRMS, NUMBERS, PEOPLE, TOWNS

definition = EnvironmentDefinition(
    name="search",
    description="Questions over a corpus whose answers need two or three documents: search, read, answer.",
    sample_task=sample_task,
    create=SearchEnvironment,
    options=SearchOptions,
    experts=EXPERTS,
    words=(*COMMON_WORDS, *BOOKS, *PEOPLE, *FIRMS, *TOWNS, *map(str, NUMBERS)),
    is_deterministic=True,
    placement="inline",  # a search takes well under a millisecond, and a corpus is made in a few
)
