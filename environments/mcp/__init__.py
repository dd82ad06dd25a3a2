"""The tools of an MCP server: tasks come from a file, each episode has a session of its own with the server.

The server is a command, spoken to by its standard input and output, or a URL (streamable HTTP). What the tools do is
its own affair; an episode ends with the first message that calls nothing, which is compared with the task's answer, or
judged by a function.
"""

from agentrl.envs.definition import EnvironmentDefinition
from agentrl_environments.mcp.environment import McpEnvironment
from agentrl_environments.mcp.options import McpOptions, num_tasks, sample_task

definition = EnvironmentDefinition(
    name="mcp",
    description="The tools of an MCP server, by its command or its URL; tasks from a file.",
    sample_task=sample_task,
    create=McpEnvironment,
    options=McpOptions,
    num_tasks=num_tasks,
)
