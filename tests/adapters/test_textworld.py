"""Games of the real TextWorld, through the adapter and by the package alone."""

from __future__ import annotations

import re

import pytest

from agentrl.types.task import Split
from tests.adapters.packaged import checked, hosted, own_play, played

pytestmark = pytest.mark.usefixtures("beside_packages")
WORLD = {"num_rooms": 2, "num_objects": 4, "quest_length": 2}


@pytest.fixture(autouse=True)
def _kept_apart(tmp_path_factory, monkeypatch):
    """Compiled games are kept for the tests of this file only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "games"))


async def test_a_game_goes_as_it_does_without_the_adapter_and_its_points_are_the_reward(tmp_path):
    async with hosted("textworld", tmp_path, **WORLD) as host:
        (task,) = await host.sample(Split.TRAIN, 0, [0])
        commands, *own = own_play(package="textworld", seed=task.payload["seed"], world=list(WORLD.values()))
        said, is_done, score = await played(host, task, commands)
        _, is_cut_done, cut = await played(host, task, commands[:-1])
    assert [is_done, score.reward, is_cut_done, cut.reward] == [True, own[-1][1] / own[0][1], False, 0.0] != [True, 0.0]
    for text, (feedback, _) in zip(said, own, strict=True):
        told = text.partition("look, inventory.\n\n")[2] or text
        assert told.split() == feedback.split()[-len(told.split()) - len(_tail(feedback)) :][: len(told.split())]


async def test_possible_commands_are_shown_where_that_is_wanted_and_the_interpreter_hears_no_others(tmp_path):
    async with hosted("textworld", tmp_path, shows_commands=True, **WORLD) as host:
        (task,) = await host.sample(Split.TRAIN, 0, [0])
        said, is_done, score = await played(host, task, ["save", "look. restart", "", "x" * 5000, "I look.\nlook"])
    shown = re.search(r"Possible commands: (.*)\.$", said[0])[1].split(", ")
    assert {"look", "inventory"} < set(shown)
    assert said[1:4] == ["That is no command of the game."] * 3
    assert said[-1].startswith("-= ")
    assert (is_done, score.reward, score.metrics["commands"]) == (False, 0.0, 2.0)


def test_the_environment_keeps_what_it_must():
    said = checked("agentrl_environments.textworld:definition", "--tasks", "2")
    assert re.search(r"gold 1\.00", said), said


def _tail(feedback: str) -> list[str]:
    """The prompt and the status line behind what a game says."""
    return feedback[feedback.rindex("\n>") :].split()
