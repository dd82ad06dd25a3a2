"""The terminal environment: one tool, a shell; right means that the files are in the end what they should be."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from agentrl.envs.authoring import tool
from agentrl.envs.sandboxed import SandboxEnvironment, files_of, write_files
from agentrl.protocols import Sandbox
from agentrl.types.environment import Score
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.sandbox import WORKSPACE, Command, CommandResult, Ended, SandboxSpec
from agentrl_environments.terminal.tasks import TerminalOptions, build_problem

_VERIFIER = """
read -r nonce
mkdir -p expected found
diff -r expected found > /dev/null 2>&1
case $? in 0) echo "$nonce right" ;; 1) echo "$nonce wrong" ;; esac
"""
_VERIFIER_S = 20.0
_PROCESSES, _DISK_BYTES = 64, 64 << 20


class TerminalEnvironment(SandboxEnvironment[TerminalOptions]):
    """A small task over files that is done by shell commands.

    The files that the agent left are taken out of its sandbox as data and compared in another one, where no command of
    the agent ever ran. All files must be as asked, those that the task does not name as they were.

    Example: ``shell {"command": "ls"}`` shows ``amber.txt``, then ``mv amber.txt maple.csv`` and the message ``done``
    score 1.0.
    """

    def prepare(self) -> None:
        """Find the problem."""
        self._problem = build_problem(self.options, self.task.payload["seed"], self.task.split)
        self._counts = {"commands": 0.0, "command_errors": 0.0}

    def spec(self) -> SandboxSpec:
        """Files, network and processes of its own, and limits that hold without root, too."""
        if not self.options.isolated:
            return SandboxSpec(needs=frozenset())
        return SandboxSpec(processes=_PROCESSES, disk_bytes=_DISK_BYTES)

    async def furnish(self) -> None:
        """Put the files of the problem into the workspace."""
        await write_files(self.sandbox, _encoded(self._problem.files))

    def prompt(self) -> str:
        """What is to be done."""
        return self._problem.prompt

    @tool
    async def shell(self, command: str) -> str:
        """Run a shell command and return its output."""
        limit = self.options.max_shown_bytes
        result = await self.execute(
            Command(("sh", "-c", command), timeout_s=self.options.command_s, max_output_bytes=limit)
        )
        self._counts["commands"] += 1
        self._counts["command_errors"] += result.exit_code != 0 or result.ended is not Ended.EXITED
        return self._shown(result)

    async def reward(self) -> Score:
        """1.0 if the files are what they should be, else 0.0."""
        found = await self._files_left()
        return Score(0.0 if found is None else float(await self._is_right(found)), dict(self._counts))

    def save(self) -> dict[str, float]:
        """What the metrics need; the files are in the sandbox."""
        return self._counts

    def load(self, state: dict[str, float]) -> None:
        """Take what `save` gave."""
        self._counts = state

    async def _files_left(self) -> dict[str, bytes] | None:
        """What the agent left, None if that is more than is taken."""
        try:
            return await files_of(self.sandbox, WORKSPACE, self.options.max_workspace_bytes)
        except EpisodeError as error:
            if error.failure.boundary is Boundary.SANDBOX and error.failure.kind == "files":
                return None
            raise

    async def _is_right(self, found: Mapping[str, bytes]) -> bool:
        sides = {"expected": _encoded(self._problem.expected), "found": found}
        async with self.fresh() as sandbox:
            files = {f"{side}/{name}": data for side, half in sides.items() for name, data in half.items()}
            await write_files(sandbox, files)
            return await _verdict(sandbox)

    def _shown(self, result: CommandResult) -> str:
        lines = [result.text.rstrip("\n")] if result.text.strip() else []
        if result.is_cut:
            lines.append("(the rest of the output was cut)")
        if result.ended is Ended.TIMEOUT:
            lines.append(f"(killed after {self.options.command_s:g} s)")
        elif result.ended is Ended.MEMORY:
            lines.append("(killed: out of memory)")
        elif result.exit_code != 0:
            lines.append(f"(exit code {result.exit_code})")
        return "\n".join(lines) or "(no output)"


async def _verdict(sandbox: Sandbox) -> bool:
    """What the verifier says; only a line with this call's own nonce counts. Raises EpisodeError if it says nothing."""
    nonce = secrets.token_hex(16)
    command = Command(("sh", "-c", _VERIFIER), stdin=f"{nonce}\n".encode(), timeout_s=_VERIFIER_S)
    result = await sandbox.run(command, f"verify-{nonce}")
    verdicts = {f"{nonce} right\n".encode(): True, f"{nonce} wrong\n".encode(): False}
    if result.stdout not in verdicts:
        raise EpisodeError(Boundary.SANDBOX, "verifier", f"it gave no verdict, but ended with {result}")
    return verdicts[result.stdout]


def _encoded(files: Mapping[str, str]) -> dict[str, bytes]:
    return {name: text.encode() for name, text in files.items()}
