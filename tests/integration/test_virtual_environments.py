"""Environments whose packages exclude each other or the run's, each by a virtual environment of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from agentrl import codec
from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.hosting import build_host
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.task import Split
from tests.integration import runs
from tests.tiny_wheel import make_wheel

pytestmark = pytest.mark.long
# An environment that cannot even be imported where its package is not; it rewards as its package says.
MODULE = """
import dataclasses
import only_there
from agentrl.types.environment import Score
from tests.integration.run_plugins import Coin, coin

class Pinned(Coin):
    async def score(self):
        score = await super().score()
        return dataclasses.replace(score, reward=score.reward + only_there.VERSION)

environment = dataclasses.replace(coin, create=Pinned)
"""
RECIPE = """
[environments.first]
name = "pinned:environment"
placement = "venv"
requirements = ["only_there @ file://{first}"]
limits = {{max_turns = 1, max_context_tokens = 512, max_reply_tokens = 100}}
[environments.second]
name = "pinned:environment"
placement = "venv"
requirements = ["{second}"]
limits = {{max_turns = 1, max_context_tokens = 512, max_reply_tokens = 100}}
"""


@pytest.mark.timeout(900)
def test_two_environments_with_pins_that_exclude_each_other_are_trained_in_one_run(
    tiny_model: Path, tmp_path: Path
) -> None:
    wheels = [make_wheel(tmp_path, "only_there", f"{number}.0", f"VERSION = {10 * number}") for number in (1, 2)]
    (tmp_path / "pinned.py").write_text(MODULE)
    before = runs.RECIPE.index("[environment]")
    behind = runs.RECIPE.index("[policies.main.chat]")
    recipe = tmp_path / "recipe.toml"
    environments = RECIPE.format(first=wheels[0], second=wheels[1])
    recipe.write_text(runs.RECIPE[:before] + environments + runs.RECIPE[behind:])
    root = Path(__file__).parents[2]
    trained = subprocess.run(
        runs.command("train", recipe, f"policies.main.model={tiny_model}", f"runs_folder={tmp_path / 'runs'}"),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{root}", "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert trained.returncode == 0, trained.stderr
    assert "making a virtual environment for environment 'pinned:environment' (once)" in trained.stdout
    run = tmp_path / "runs" / "test-seed0"
    rewards: dict[str, set[int]] = {}  # without what the coin gives, 0 to 1
    for line in runs.rows(run / "ledger.jsonl"):
        if line["outcome"] == "trained":
            rewards.setdefault(line["environment"], set()).add(int(line["reward"]) // 10)
    assert rewards == {"first": {1}, "second": {2}}
    locks = {name: (run / "logs" / f"environment-{name}.requirements.txt").read_text() for name in rewards}
    assert "only_there-1.0-py3" in locks["first"]
    assert "only_there-2.0-py3" in locks["second"]
    assert "torch" not in locks["first"]


@pytest.mark.timeout(600)
async def test_an_episode_is_byte_for_byte_the_same_inline_in_a_process_and_in_a_virtual_environment(
    tmp_path: Path,
) -> None:
    played = {}
    for placement in ("inline", "process", "venv"):
        (logs := tmp_path / placement).mkdir()
        host = await build_host(EnvironmentConfig(name="sql", placement=placement), 60.0, logs)
        said = [codec.encode(host.description.recovery)]
        for task in await host.sample(Split.TRAIN, 5, range(4)):
            async with host.open(task) as environment:
                said += [codec.encode(task), codec.encode(opening := await environment.start())]
                for number, tool in enumerate(opening.tools):
                    call = ToolCall(
                        str(number), tool.name, {"table": "nothing", "sql": "select 1", "query": "select 1"}
                    )
                    said.append(codec.encode(await environment.step(Message(Role.ASSISTANT, "", (call,)))))
                said.append(codec.encode(await environment.step(Message(Role.ASSISTANT, "1"))))
                said.append(codec.encode(await environment.score()))
        await host.close()
        played[placement] = said
    assert len(played["inline"]) > 20
    assert played["process"] == played["inline"]
    assert played["venv"] == played["inline"]
