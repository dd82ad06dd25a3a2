"""Python modules with a bug, mended in a sandbox; hidden tests judge, out of reach of what the agent wrote.

See README.md beside this file.
"""

from dataclasses import replace

from agentrl.envs.sandboxed import define_sandboxed
from agentrl_environments.code_repair.environment import CodeRepairEnvironment
from agentrl_environments.code_repair.experts import EXPERTS
from agentrl_environments.code_repair.tasks import GENERATED, CodeRepairOptions, num_tasks, sample_task
from agentrl_environments.code_repair.templates import FUNCTIONS, NAMES

definition = replace(
    define_sandboxed("code_repair", CodeRepairEnvironment, GENERATED, options=CodeRepairOptions, experts=EXPERTS),
    sample_task=sample_task,  # which source has them is an option
    num_tasks=num_tasks,
    placement="inline",  # every call waits for a sandbox, or makes a task in milliseconds
    words=(*NAMES, *FUNCTIONS),
)
