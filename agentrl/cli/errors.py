"""Turns the platform's errors into one clear message and an exit code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import typer

P = ParamSpec("P")


def reported(command: Callable[P, None]) -> Callable[P, None]:
    """A command whose `AgentRLError` is printed as one message, with exit code 1 instead of a traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        from agentrl.types.errors import AgentRLError

        try:
            command(*args, **kwargs)
        except AgentRLError as error:
            typer.secho(f"error: {error}", fg="red", err=True)
            raise typer.Exit(1) from None

    return run
