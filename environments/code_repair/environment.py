"""The code repair environment: read a file, write it, run the tests; right means that hidden tests pass."""

from __future__ import annotations

from agentrl.envs.authoring import ToolError, tool
from agentrl.envs.sandboxed import SandboxEnvironment, files_of, write_file
from agentrl.types.environment import Score
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.sandbox import WORKSPACE, Command, CommandResult, SandboxSpec
from agentrl_environments.code_repair.suites import Verdict, try_solution
from agentrl_environments.code_repair.tasks import FILE, CodeRepairOptions, problem_of

_FILE_S = 5.0
_WRITE = 'case "$1" in */*) mkdir -p -- "${1%/*}";; esac && cat > "$1"'
_PROCESSES, _DISK_BYTES = 64, 64 << 20


class CodeRepairEnvironment(SandboxEnvironment[CodeRepairOptions]):
    """A Python module with a bug, which the agent mends by rewriting its file.

    When the agent has stopped, the bytes of that file alone are taken out of its sandbox and tested in another one by
    tests that were nowhere before. See `tester.py` for what keeps a solution from the verdict.

    Example: ``read {"path": "solution.py"}`` shows ``make = lambda rate, size: rate - size``, and writing it with ``+``
    scores 1.0 where the task is to add.
    """

    def prepare(self) -> None:
        """Find the problem."""
        self._problem = problem_of(self.options, self.task)
        self._test_runs = 0

    def spec(self) -> SandboxSpec:
        """Files, network and processes of its own, and limits that hold without root, too."""
        if not self.options.isolated:
            return SandboxSpec(needs=frozenset())
        return SandboxSpec(processes=_PROCESSES, disk_bytes=_DISK_BYTES)

    async def furnish(self) -> None:
        """Put the module into the workspace."""
        await write_file(self.sandbox, FILE, self._problem.module.encode())

    def prompt(self) -> str:
        """What is to be done."""
        return self._problem.description

    @tool
    async def read(self, path: str) -> str:
        """Return the content of a file."""
        command = Command(("cat", "--", path), timeout_s=_FILE_S, max_output_bytes=self.options.max_file_bytes)
        result = await self._carry_out(path, command)
        return f"{result.text}\n(the rest was cut)" if result.is_cut else result.text

    @tool
    async def write(self, path: str, content: str) -> str:
        """Write a file."""
        data = content.encode(errors="surrogateescape")
        await self._carry_out(path, Command(("sh", "-c", _WRITE, "sh", path), stdin=data, timeout_s=_FILE_S))
        return "written"

    @tool
    async def run_tests(self) -> str:
        """Run the visible tests."""
        visible = self._problem.visible
        if visible is None:
            raise ToolError("there are no visible tests")
        self._test_runs += 1
        solution = await self._solution()
        if solution is None:
            raise ToolError(f"there is no file {FILE}, or it is too long")
        options = self.options
        return _told(await try_solution(self.execute, solution, visible, options.call_s, options.total_s))

    async def reward(self) -> Score:
        """1.0 if all hidden tests pass, else 0.0."""
        solution = await self._solution()
        verdict = None if solution is None else await self._judge(solution)
        passed = 0.0 if verdict is None else verdict.passed / verdict.tests
        is_right = verdict is not None and verdict.is_right
        return Score(float(is_right), {"hidden_passed": passed, "test_runs": float(self._test_runs)})

    def save(self) -> int:
        """What the metrics need; the files are in the sandbox."""
        return self._test_runs

    def load(self, state: int) -> None:
        """Take what `save` gave."""
        self._test_runs = state

    async def _judge(self, solution: bytes) -> Verdict | None:
        async with self.fresh() as sandbox:

            async def run(command: Command) -> CommandResult:
                return await sandbox.run(command, "verify")

            options = self.options
            return await try_solution(run, solution, self._problem.hidden, options.call_s, options.total_s)

    async def _solution(self) -> bytes | None:
        """The solution's file as the agent left it, if it is a file and there is not too much beside it."""
        try:
            return (await files_of(self.sandbox, WORKSPACE, self.options.max_file_bytes)).get(FILE)
        except EpisodeError as error:
            if error.failure.boundary is Boundary.SANDBOX and error.failure.kind == "files":
                return None
            raise

    async def _carry_out(self, path: str, command: Command) -> CommandResult:
        if "\0" in path:
            raise ToolError("a path has no zero byte")
        result = await self.execute(command)
        if result.exit_code != 0:
            raise ToolError(result.stderr.decode(errors="replace").strip() or f"{path}: nothing within {_FILE_S:g} s")
        return result


def _told(verdict: Verdict | None) -> str:
    if verdict is None:
        return "the tests were stopped before they had ended"
    if verdict.is_right:
        return f"all {verdict.tests} tests passed"
    return "\n".join([f"{verdict.passed} of {verdict.tests} tests passed", *verdict.wrong])
