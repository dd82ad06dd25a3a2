"""``agentrl env``."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.errors import reported
from agentrl.cli.extras import needs
from agentrl.types.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from agentrl.checking.players import MakePlayer
    from agentrl.checking.playing import PlayedEpisode, PlayedStep
    from agentrl.checking.subject import Finding, Subject
    from agentrl.types.environment import Opening
    from agentrl.types.message import Message

environments = typer.Typer(help="Environments.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(help="Registered name, or module:attribute.")]
Options = Annotated[str, typer.Option("--options", help="The environment's options, as JSON.")]
SandboxKind = Annotated[str, typer.Option(help="Sandboxes, if it asks for some: bwrap, docker or local.")]
MaxTurns = Annotated[int, typer.Option(min=1, help="Turns after which an episode is cut off.")]
_SHOWN = 2000  # characters of a message


@environments.callback()
def main() -> None:
    """Environments."""


@environments.command("list")
@reported
def list_environments() -> None:
    """List what is installed, without importing any of it."""
    from agentrl import registry

    plugins = registry.list_plugins(registry.ENVIRONMENTS)
    typer.echo("\n".join(f"{plugin.name:<20} {plugin.target:<50} {plugin.distribution}" for plugin in plugins))


@environments.command("run")
@reported
def run(
    name: Name,
    policy: Annotated[
        str, typer.Option(help="random, an expert of the environment such as gold, or the URL of an OpenAI-style API.")
    ] = "random",
    model: Annotated[str, typer.Option(help="Name of the model, for a URL.")] = "default",
    episodes: Annotated[int, typer.Option(min=1, help="Episodes, each of another task.")] = 1,
    max_turns: MaxTurns = 20,
    seed: Annotated[int, typer.Option(help="Of the policy's chance.")] = 0,
    options: Options = "{}",
    sandbox: SandboxKind = "bwrap",
) -> None:
    """Play episodes and print them.

    The key for a URL is taken from OPENAI_API_KEY.
    """
    from agentrl.cli.tables import wide_console

    asyncio.run(_play(wide_console(), name, policy, model, episodes, max_turns, seed, _parsed(options), sandbox))


@environments.command("check")
@reported
def check(
    name: Name,
    tasks: Annotated[int, typer.Option(min=2, help="Training tasks that are played.")] = 12,
    max_turns: MaxTurns = 20,
    options: Options = "{}",
    sandbox: SandboxKind = "bwrap",
) -> None:
    """Try whether an environment keeps what it promises; the exit status is 1 where it does not."""
    from agentrl.checking.subject import Verdict
    from agentrl.cli.tables import wide_console

    findings = asyncio.run(_check(wide_console(), name, tasks, max_turns, _parsed(options), sandbox))
    failed = [finding for finding in findings if finding.verdict is Verdict.FAILED]
    typer.echo()
    if failed:
        typer.secho(f"{name}: {len(failed)} of {len(findings)} checks failed", fg="red")
        raise typer.Exit(1)
    typer.secho(f"{name} keeps what it promises", fg="green")


@environments.command("init")
@reported
def init(
    name: Annotated[str, typer.Argument(help="Name of the new package.")],
    folder: Annotated[Path, typer.Option(help="Where its folder is made.")] = Path(),
) -> None:
    """Make a working environment with tasks, a gold player, tests and recipes, to go on from."""
    from agentrl.cli.starting import make_package

    made = make_package("environment", name, folder)
    for file in made:
        typer.echo(file)
    typer.echo(f"\nnext: cd {folder / name}, and go on as its README.md says")


@environments.command("serve")
@reported
@needs("serve")
def serve(
    names: Annotated[list[str], typer.Argument(help="Registered names, or module:attribute.")],
    options: Annotated[
        str,
        typer.Option("--options", help="The environment's options, as JSON; of several, by name."),
    ] = "{}",
    host: Annotated[str, typer.Option(help="Address to listen on; all but loopback needs --token-file.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port to listen on; 0 chooses one.")] = 8100,
    token_file: Annotated[Path | None, typer.Option(help="File with the bearer token that clients need.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that serve the port.")] = 1,
    max_sessions: Annotated[int, typer.Option(min=1, help="Sessions at once.")] = 1000,
    call_s: Annotated[float, typer.Option(min=0.001, help="Seconds that a call may take.")] = 60.0,
    idle_s: Annotated[float, typer.Option(min=0.001, help="Seconds after which an unused session ends.")] = 600.0,
    session_s: Annotated[float, typer.Option(min=0.001, help="Seconds that a session may live.")] = 14400.0,
    drain_s: Annotated[float, typer.Option(min=0, help="Seconds that sessions have to end once it is to stop.")] = 60.0,
    max_message_mb: Annotated[float, typer.Option(min=0.001, help="Largest message.")] = 16.0,
    logs: Annotated[Path | None, typer.Option(help="Folder for what environments write.")] = None,
    sandbox: SandboxKind = "bwrap",
) -> None:
    """Serve environments to runs on this and other machines, until interrupted.

    A recipe plays them with placement = "remote" and servers = ["http://HOST:PORT"].
    """
    from agentrl.process.loop import run_async
    from agentrl.serving.options import ServerOptions, SessionLimits
    from agentrl.serving.parent import serve as serve_until_stopped

    values = _parsed(options)
    with _folder_of(logs) as folder:
        server = ServerOptions(
            {names[0]: values} if len(names) == 1 else _by_name(names, values),
            str(folder),
            None if token_file is None else _token_in(token_file),
            workers,
            SessionLimits(max_sessions, call_s, idle_s, session_s),
            drain_s,
            int(max_message_mb * 2**20),
            sandbox,
        )
        run_async(
            serve_until_stopped(
                server,
                host,
                port,
                lambda address: typer.echo(f"serving {', '.join(names)} at {address}; Ctrl-C ends it in order"),
            )
        )


async def _check(
    console: Console, name: str, tasks: int, max_turns: int, options: dict[str, Any], sandbox: str
) -> list[Finding]:
    from agentrl.checking import checks
    from agentrl.sandbox.config import SandboxConfig

    findings: list[Finding] = []
    async with checks.opened(name, options, tasks, max_turns, sandbox=SandboxConfig(kind=sandbox)) as subject:
        console.print(f"{subject.name}: {subject.definition.description}\n")
        with console.status("") as status:
            for name_of_check in checks.CHECKS:
                status.update(f"{name_of_check} ...")
                findings.append(await checks.check(subject, name_of_check))
                _show_finding(console, findings[-1])
    return findings


def _show_finding(console: Console, finding: Finding) -> None:
    from rich.markup import escape

    from agentrl.checking.subject import Verdict

    mark, colour = {
        Verdict.OK: ("✓", "green"),
        Verdict.NOTE: ("!", "yellow"),
        Verdict.FAILED: ("✗", "red"),
        Verdict.SKIPPED: ("-", "dim"),
    }[finding.verdict]
    console.print(f"  [{colour}]{mark}[/] {finding.check:<18} {escape(finding.message)}")
    if finding.remedy:
        console.print(f"    {'':<18} [{colour}]→[/] {escape(finding.remedy)}")


async def _play(
    console: Console,
    name: str,
    policy: str,
    model: str,
    episodes: int,
    max_turns: int,
    seed: int,
    options: dict[str, Any],
    sandbox: str,
) -> None:
    from agentrl.checking.checks import opened
    from agentrl.checking.playing import play
    from agentrl.sandbox.config import SandboxConfig

    rewards: list[float] = []
    async with AsyncExitStack() as stack:
        subject = await stack.enter_async_context(
            opened(name, options, episodes, max_turns, sandbox=SandboxConfig(kind=sandbox))
        )
        make = await _player(stack, subject, policy, model)
        shown = _Shown(console)
        for number, task in enumerate(subject.train_tasks[:episodes]):
            console.rule(task.id, align="left")
            player = make(task, seed + number)
            played = await play(subject.host, task, player, max_turns, shown.opening, shown.step)
            _show_end(console, played)
            rewards += [] if played.reward is None else [played.reward]
    if rewards:
        console.print(f"\nmean reward {sum(rewards) / len(rewards):.3f} of {len(rewards)} episodes")


async def _player(stack: AsyncExitStack, subject: Subject, policy: str, model: str) -> MakePlayer:
    """Players of a policy by name or URL. Raises ConfigError."""
    if policy == "random":
        return subject.players["random"]
    if "://" not in policy:
        return subject.expert(policy)
    import os

    from agentrl.cli.extras import missing_packages, remedy

    if missing_packages("train"):
        raise ConfigError(f"a policy at a URL needs the extra 'train': {remedy('train')}")
    from agentrl.checking.endpoint import EndpointPlayer

    player = EndpointPlayer(policy, model, os.environ.get("OPENAI_API_KEY"))
    stack.push_async_callback(player.close)
    return lambda task, seed: player


class _Shown:
    """Prints an episode while it is played."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def opening(self, opening: Opening) -> None:
        """The first messages, and the names of the tools."""
        for message in opening.messages:
            self._message(message.role.value, message)
        if opening.tools:
            self._console.print(f"  tools: {', '.join(spec.name for spec in opening.tools)}", style="dim")

    def step(self, step: PlayedStep) -> None:
        """What the player did, and the reaction."""
        self._message(step.agent or "assistant", step.action, "cyan")
        for message in step.result.messages:
            self._message(message.role.value, message)

    def _message(self, who: str, message: Message, colour: str = "bold") -> None:
        from rich.markup import escape

        lines = [message.content] if message.content or not message.tool_calls else []
        lines += [f"{call.name}({call.raw or json.dumps(call.arguments)})" for call in message.tool_calls]
        for line in lines:
            shown = line if len(line) <= _SHOWN else f"{line[:_SHOWN]}... ({len(line):,} characters)"
            self._console.print(f"  [{colour}]{who:>9}[/]  {escape(shown)}", soft_wrap=True)


def _show_end(console: Console, played: PlayedEpisode) -> None:
    from rich.markup import escape

    if played.failure is not None:
        console.print(f"  [red]failed[/]  {escape(str(played.failure))}", soft_wrap=True)
        console.print(played.failure.trace, style="dim", markup=False, soft_wrap=True)
    else:
        ending = " (cut off: no turns left)" if played.is_cut else ""
        metrics = {} if played.score is None else played.score.metrics
        told = "".join(f", {name} {value:g}" for name, value in metrics.items())
        reward = "none" if played.reward is None else f"{played.reward:g}"
        console.print(f"  [green]reward {reward}[/]{told}{ending}")


@contextmanager
def _folder_of(logs: Path | None) -> Iterator[Path]:
    """The folder for logs, made if it is not there. Raises ConfigError."""
    with tempfile.TemporaryDirectory(prefix="agentrl-logs-") if logs is None else nullcontext(logs) as folder:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--logs {folder} cannot be made: {error}; give another folder") from error
        yield Path(folder)


def _token_in(file: Path) -> str:
    try:
        token = file.read_text().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token-file {file} cannot be read: {error}; give a text file with the token") from error
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(f"--token-file {file} has no token; write one line of printable ASCII into it")
    return token


def _by_name(names: list[str], values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Options of each environment. Raises ConfigError for those of one that is not served."""
    if unknown := sorted(set(values) - set(names)):
        raise ConfigError(f"--options names {', '.join(unknown)}; with several environments write {{NAME: {{...}}}}")
    if wrong := [name for name, options in values.items() if not isinstance(options, dict)]:
        raise ConfigError(f"--options: those of {wrong[0]} are no object; write {{NAME: {{...}}}}")
    return {name: values.get(name, {}) for name in names}


def _parsed(options: str) -> dict[str, Any]:
    try:
        values = json.loads(options)
    except ValueError as error:
        raise ConfigError(f"--options is not JSON ({error}); write it as --options '{{\"key\": 1}}'") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--options is {type(values).__name__}; write an object, as --options '{{\"key\": 1}}'")
    return values
