"""An environment whose tasks agents do by tools of their own: files with asked texts, in a sandbox."""

from __future__ import annotations

from agentrl.config.base import ConfigModel
from agentrl.envs.authoring import Rows
from agentrl.envs.sandboxed import SandboxEnvironment, define_sandboxed, files_of
from agentrl.types.sandbox import WORKSPACE, SandboxSpec
from tests.agents.policies import task

ONE_FILE, TWO_FILES = [("93 apples,\tcafé", "a.txt")], [("one", "a.txt"), ("two", "b.txt")]


class WritingOptions(ConfigModel):
    """There are none."""


class Writing(SandboxEnvironment[WritingOptions]):
    """Asks for files, and looks whether they are there."""

    def spec(self) -> SandboxSpec:
        return SandboxSpec()

    def prompt(self) -> str:
        return task(self.row["files"])

    async def reward(self) -> float:
        found = await files_of(self.sandbox, WORKSPACE, 1 << 20)
        return float(found == {name: text.encode() for text, name in self.row["files"]})


definition = define_sandboxed(
    "writing", Writing, Rows([{"files": ONE_FILE}, {"files": TWO_FILES}]), options=WritingOptions
)
