"""Turns what a person or a file got wrong into one clear message and an exit code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec

import typer

P = ParamSpec("P")
# Its name is public in some versions of typer and private in others.
_UsageError: type[Any] = typer.BadParameter.__bases__[0]


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


@contextmanager
def usage_in_one_line() -> Iterator[None]:
    """A command line that cannot be read is told in one line, with the help to look at, and ends with exit code 2."""
    try:
        yield
    except _UsageError as error:
        # Without any arguments the message is the help itself.
        if error.ctx is not None and error.message == error.ctx.get_help():
            raise
        text = " ".join(error.format_message().split()).rstrip(".")
        typer.secho(f"error: {text}; see {_command(error.ctx)} --help", fg="red", err=True)
        raise typer.Exit(2) from None


def _command(context: Any) -> str:
    """The words that call a command, whatever the program was started as."""
    words: list[str] = []
    while context is not None and context.parent is not None:
        words.append(context.info_name)
        context = context.parent
    return " ".join(["agentrl", *reversed(words)])
