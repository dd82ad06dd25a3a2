"""Small tasks over files, done by shell commands in a sandbox: look, act, say so.

As in ``sql`` the lesson is procedure: a warm start on the clumsy expert contains every skill, and reinforcement selects
the habit that works. See README.md beside this file.
"""

from dataclasses import replace

from agentrl.envs.sandboxed import define_sandboxed
from agentrl_environments.terminal.environment import TerminalEnvironment
from agentrl_environments.terminal.experts import EXPERTS
from agentrl_environments.terminal.names import ENDINGS, STEMS, WORDS
from agentrl_environments.terminal.tasks import TASKS, TerminalOptions

definition = replace(
    define_sandboxed("terminal", TerminalEnvironment, TASKS, options=TerminalOptions, experts=EXPERTS),
    placement="inline",  # every call waits for a sandbox
    words=(*STEMS, *ENDINGS, *WORDS, *(str(n) for n in range(10, 100))),
)
