"""Orders to deliver in a small world of records: eleven calls each, of which most need what the one before gave.

A wrong choice early is carried out and shows at the end. States can be restored. See README.md beside this file.
"""

from agentrl.envs.definition import EnvironmentDefinition
from agentrl.types.task import Task
from agentrl_environments.invented import COMMON_WORDS
from agentrl_environments.workflow.environment import WorkflowEnvironment
from agentrl_environments.workflow.experts import EXPERTS
from agentrl_environments.workflow.tasks import (
    CARRIERS,
    CUSTOMERS,
    ITEMS,
    TOWNS,
    WAREHOUSES,
    WorkflowOptions,
    sample_task,
)
from agentrl_environments.workflow.world import GRADES, HANDLINGS, TARIFFS


def _restore(options: WorkflowOptions, task: Task, snapshot: bytes) -> WorkflowEnvironment:
    environment = WorkflowEnvironment(options, task)
    environment.restore(snapshot)
    return environment


_NAMES = (*COMMON_WORDS, *CUSTOMERS, *ITEMS, *TOWNS, *WAREHOUSES, *CARRIERS)
definition = EnvironmentDefinition(
    name="workflow",
    description="Orders to deliver by long chains of steps, where an early mistake shows at the end.",
    sample_task=sample_task,
    create=WorkflowEnvironment,
    options=WorkflowOptions,
    experts=EXPERTS,
    words=(*_NAMES, *GRADES, *TARIFFS, *HANDLINGS, *(str(number) for number in range(10, 100))),
    is_deterministic=True,
    restore=_restore,
    placement="inline",  # every call looks up a few records
)
