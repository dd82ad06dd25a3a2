"""The command line. Each command loads what it needs when it runs, so that help costs next to nothing."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from agentrl.cli.demo import demo
from agentrl.cli.doctor import doctor
from agentrl.cli.engine import engine
from agentrl.cli.environments import environments
from agentrl.cli.errors import usage_in_one_line
from agentrl.cli.evaluate import evaluate
from agentrl.cli.jobs import jobs, submit
from agentrl.cli.model import model
from agentrl.cli.plan import plan
from agentrl.cli.prm import prm
from agentrl.cli.replay import replay
from agentrl.cli.rescore import rescore
from agentrl.cli.runs import runs
from agentrl.cli.scaffolds import scaffolds
from agentrl.cli.show import show
from agentrl.cli.train import resume, train
from agentrl.cli.warmstart import warmstart


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"agentrl {metadata.version('agentrl')}")
        raise typer.Exit


class _Commands(TyperGroup):
    """All commands; a wrong option of any of them is one line."""

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        with usage_in_one_line():
            return super().make_context(*arguments, **settings)

    def invoke(self, ctx: Any) -> Any:
        with usage_in_one_line():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train language-model agents by reinforcement learning on whole multi-turn episodes."""


app.command()(demo)
app.command()(warmstart)
app.command()(train)
app.command()(resume)
app.command()(submit)
app.command("eval")(evaluate)
app.command()(engine)
app.command()(show)
app.command()(replay)
app.command()(rescore)
app.command()(plan)
app.command()(doctor)
app.add_typer(jobs, name="jobs")
app.add_typer(runs, name="runs")
app.add_typer(model, name="model")
app.add_typer(prm, name="prm")
app.add_typer(environments, name="env")
app.add_typer(scaffolds, name="scaffold")

if __name__ == "__main__":
    app()
