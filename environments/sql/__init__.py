"""Questions over a small database of unknown schema: look, query, answer.

The lesson that a policy learns here is procedure, not SQL: a warm start on the clumsy expert already
contains every skill, and reinforcement selects the habit that works. See README.md beside this file.
"""

from agentrl.envs.definition import EnvironmentDefinition
from agentrl_environments.sql.environment import SqlEnvironment
from agentrl_environments.sql.experts import EXPERTS
from agentrl_environments.sql.names import FIRST_WORDS, PEOPLE, SECOND_WORDS
from agentrl_environments.sql.tasks import SqlOptions, sample_task

definition = EnvironmentDefinition(
    name="sql",
    description="Questions over a small SQLite database: look at the schema, query, answer.",
    sample_task=sample_task,
    create=SqlEnvironment,
    options=SqlOptions,
    experts=EXPERTS,
    words=(*FIRST_WORDS, *(f"_{word}" for word in SECOND_WORDS), *PEOPLE, *(str(n) for n in range(10, 100))),
    is_deterministic=True,
    placement="inline",  # every call is bounded by SQLite's own limits and takes well under a millisecond
)
