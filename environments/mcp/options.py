"""Which MCP server, and what the tasks are."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from agentrl.envs.authoring import Rows
from agentrl.types.environment import Score
from agentrl.types.errors import ConfigError
from agentrl.types.message import Message
from agentrl.types.task import Split, Task
from agentrl_environments.packages import Package, PackagedOptions

MCP = Package("mcp", "==2.*")
Judge = Callable[[Mapping[str, Any], str | None, Sequence[Message]], float | Score | Awaitable[float | Score]]
"""Judges an episode by the task's row, the answer (None if there was none), and the whole conversation."""


class McpOptions(PackagedOptions):
    """Which server, and how its tasks are posed and judged."""

    command: tuple[str, ...] = ()
    """Starts a server that speaks by standard input and output, such as ``["python", "server.py"]``; one an episode."""
    url: str | None = None
    """URL of a server of streamable HTTP, such as ``http://127.0.0.1:8000/mcp``; give this or `command`."""
    token_variable: str | None = None
    """Environment variable that has the bearer token of the server at `url`."""
    variables: tuple[str, ...] = ()
    """Environment variables that a server started by `command` gets, beside PATH, HOME and the like."""
    instructions: str = ""
    """What the policy is told before the prompt."""
    tasks: Path
    """File with a JSON object a line: ``prompt``, ``answer``, and whatever `judge` goes by. A tenth is held out."""
    judge: str | None = None
    """Function that judges, as ``module:attribute``. It takes the task's row, the answer or None, and the conversation,
    and gives a number or a `Score`. Without one the answer must be the row's, but for space around it."""
    connect_s: Annotated[float, Field(gt=0)] = 15.0
    """For a server to start, to greet and to list its tools. Raise it for one that starts slowly, with
    ``rollout.limits.tool_s``, which ends the worker and must be longer by the ten seconds that a session has to end."""
    call_s: Annotated[float, Field(gt=0)] = 15.0
    """For a call to be answered; the session is given up behind it. Raise it for slow tools, with ``tool_s``."""

    @model_validator(mode="after")
    def _has_one_server(self) -> McpOptions:
        if bool(self.command) == (self.url is not None):
            raise ValueError("give command, which starts a server, or url, where one is; one of them")
        if self.token_variable is not None and self.url is None:
            raise ValueError("token_variable is for a server at a url; one that a command starts gets variables")
        if self.variables and not self.command:
            raise ValueError("variables are for a server that a command starts; one at a url gets token_variable")
        return self

    @property
    def server(self) -> str:
        """The server, for people."""
        return self.url if self.url is not None else " ".join(self.command)


def num_tasks(options: McpOptions) -> int:
    """Number of training tasks. Raises ConfigError for whatever is missing, from the package to a variable."""
    if options.command and shutil.which(options.command[0]) is None:
        raise ConfigError(f"mcp: there is no program '{options.command[0]}'; install it, or correct command")
    for name in (*options.variables, *filter(None, [options.token_variable])):
        value_of(name, options)
    judge_of(options.judge)
    found = _rows(options.tasks, options.judge is None).num_tasks
    MCP.load("mcp", options)
    return found


def sample_task(options: McpOptions, split: Split, ordinal: int, seed: int) -> Task:
    """The task of that ordinal, from the file. Raises ConfigError."""
    return _rows(options.tasks, options.judge is None).task("mcp", split, ordinal, seed)


def value_of(name: str, options: McpOptions) -> str:
    """The value of an environment variable that a server needs. Raises ConfigError if it is not set."""
    value = os.environ.get(name)
    if not value:
        raise ConfigError(f"environment variable {name} is not set; {options.server} needs it")
    return value


@cache
def judge_of(name: str | None) -> Judge:
    """The function of that name, or the comparison of answers. Raises ConfigError if there is none."""
    if name is None:
        return _is_the_answer
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f"judge '{name}' names no function; write it as module:attribute")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"judge '{name}' cannot be loaded: {error}; install its package, or correct it") from error
    if not callable(found):
        raise ConfigError(f"judge '{name}' is a {type(found).__name__} and no function")
    judge: Judge = found
    return judge


def _is_the_answer(row: Mapping[str, Any], answer: str | None, messages: Sequence[Message]) -> float:
    return float(bool(answer) and str(answer).strip() == str(row["answer"]).strip())


@cache
def _rows(file: Path, needs_answers: bool) -> Rows:
    return Rows(file, fields=("prompt", "answer") if needs_answers else ("prompt",))
