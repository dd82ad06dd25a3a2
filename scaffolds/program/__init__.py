"""A black-box agent: any command that speaks OpenAI's or Anthropic's protocol acts in the environment's sandbox."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from agentrl.protocols import Scaffold, ScaffoldContext
from agentrl.types.environment import Opening
from agentrl.types.errors import ConfigError
from agentrl.types.message import Message, Role
from agentrl.types.program import GatewayAccess, RunsPrograms
from agentrl.types.sandbox import Command

# The gateway's address is known inside the sandbox alone. The home is apart from the workspace, in which everything is
# the task's: agents keep settings and histories at home.
_START = """
HOME=$(mktemp -d) || exit 125
export HOME ANTHROPIC_BASE_URL="$AGENTRL_GATEWAY"
export OPENAI_BASE_URL="$AGENTRL_GATEWAY/v1" OPENAI_API_BASE="$AGENTRL_GATEWAY/v1"
while [ "$1" != -- ]; do
  case "$1" in */*) mkdir -p "$HOME/${1%/*}" ;; esac
  printf %s "$2" > "$HOME/$1" || exit 125
  shift 2
done
shift
"$@"
code=$?
rm -rf "$HOME"
exit $code
"""
_MOST_BYTES = 96 << 10  # a file is a word of a command line
_PLACE = re.compile(r"\{(prompt|key|model)\}")


class Program(Scaffold, RunsPrograms):
    """Runs a command in the sandbox; every reply of a model that it asks for is the policy's.

    In `command`, in `home_files` (by their path below ``$HOME``) and in `environment`, ``{prompt}`` stands for the text
    of the environment's opening, ``{key}`` for the API key and ``{model}`` for the first agent's name. `copied_files`
    are files of this machine, by their path below ``$HOME``, which come as they are: a path, or ``package:path`` for
    one that an installed package brings. ``$HOME`` is a folder of its own, with nothing but these; the command starts
    in the workspace, and what it prints is its answer to the environment. The gateway is at ``$AGENTRL_GATEWAY``;
    ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL`` and ``ANTHROPIC_API_KEY`` are set. A program that
    outlives `timeout_s` is killed, and judged by what it has done; an episode that outlives its limits has failed.

    Example: ``Program(["my-agent", "--model", "{model}", "{prompt}"], timeout_s=300)``.
    """

    runs_programs: Literal[True] = True

    def __init__(
        self,
        command: Sequence[str],
        timeout_s: float = 540.0,
        environment: Mapping[str, str] | None = None,
        home_files: Mapping[str, str] | None = None,
        copied_files: Mapping[str, str] | None = None,
        max_output_bytes: int = 65536,
    ) -> None:
        if isinstance(command, str) or not command:
            raise ConfigError(
                f"program: command is {command!r}; give its words as a list, such as ['my-agent', '{{prompt}}']"
            )
        self._command, self._timeout_s = tuple(command), timeout_s
        self._environment, self._home_files = dict(environment or {}), dict(home_files or {})
        self._copied = {name: _read(file) for name, file in (copied_files or {}).items()}
        self._max_output_bytes = max_output_bytes

    async def run(self, context: ScaffoldContext) -> None:
        """Play one episode to its end."""
        opening = await context.start()
        async with context.gateway() as access:
            result = await context.run(self._command_for(opening, access, context.agents[0]))
            answer = result.stdout.decode(errors="replace").strip()
            await context.step(Message(Role.ASSISTANT, answer))

    def _command_for(self, opening: Opening, access: GatewayAccess, model: str) -> Command:
        prompt = "\n\n".join(message.content for message in opening.messages)

        values = {"prompt": prompt, "key": access.key, "model": model}

        def filled(text: str) -> str:
            return _PLACE.sub(lambda found: values[found[1]], text)

        contents = {path: filled(text) for path, text in self._home_files.items()} | self._copied
        files = [part for file in contents.items() for part in file]
        keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), access.key)
        return Command(
            ("sh", "-c", _START, "sh", *files, "--", *map(filled, self._command)),
            timeout_s=self._timeout_s,
            max_output_bytes=self._max_output_bytes,
            environment={**keys, **{name: filled(value) for name, value in self._environment.items()}},
        )


def _read(file: str) -> str:
    """The text of a file. Raises ConfigError."""
    package, colon, inner = file.rpartition(":")
    try:
        folder = _folder_of(package) if colon else ""
        text = Path(folder, inner).read_text()
    except (OSError, ImportError, UnicodeDecodeError) as error:
        raise ConfigError(f"program: copied file {file} cannot be read: {error}") from error
    if len(text.encode()) > _MOST_BYTES:
        raise ConfigError(
            f"program: copied file {file} has over {_MOST_BYTES} bytes; have the sandbox show it by the option "
            "read_only of bwrap, or put it into an image"
        )
    return text


def _folder_of(package: str) -> str:
    """Where an installed package lies, which is not imported. Raises ImportError."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"no package {package} is installed")
    return spec.submodule_search_locations[0]
