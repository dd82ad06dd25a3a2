from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest

from agentrl.types.errors import ConfigError, EpisodeError
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.task import Split
from agentrl_environments.gym import definition
from agentrl_environments.gym.environment import GymEnvironment
from agentrl_environments.gym.games import NumberedGame, StringGame
from agentrl_environments.gym.options import GymOptions
from agentrl_environments.gym.tasks import check_game, sample_task
from agentrl_environments.randomness import OwnChance

COUNTER = GymOptions(source="factory", game="tests.adapters.packages_side.counter:make", arguments={"goal": 3})


class Line:
    """A number line of Gymnasium's interface: 0 steps back, 1 steps on, 2 stays."""

    render_mode = None

    def __init__(self, reward: object = 0.5) -> None:
        self.place, self.reward = 0, reward

    def reset(self, seed=None):
        self.place = 0
        return self.place, {}

    def step(self, action):
        self.place += (-1, 1, 0)[action]
        return self.place, self.reward, self.place == 2, False, {}


def line(reward: object = 0.5) -> NumberedGame:
    game = NumberedGame("line", Line(reward), "Walk.", {"back": 0, "on": 1, "stay put": 2})
    assert game.reset(0) == "Walk.\n\n0"
    return game


@pytest.mark.parametrize(
    ("reply", "place"),
    [("on", "1"), ("ON.", "1"), ("I will not go back, but on!", "1"), ("on? back", "-1"), ("Stay put", "0")],
)
def test_the_action_is_the_one_that_a_reply_names_last(reply, place):
    assert line().move(reply).text == place


@pytest.mark.parametrize("reply", ["", "onward", "stay", "1", "é\x00"])
def test_a_reply_that_names_no_action_is_answered_and_the_game_hears_nothing_of_it(reply):
    game = line()
    move = game.move(reply)
    assert (move.reward, move.is_over) == (None, False)
    assert "back, on, stay put" in move.text
    assert game.environment.place == 0


@pytest.mark.parametrize("reward", [None, "1", True, math.nan, math.inf])
def test_a_reward_that_is_no_finite_number_is_named(reward):
    with pytest.raises(EpisodeError, match=r"line gave the reward .*, not a finite number"):
        line(reward).move("on")


@pytest.mark.parametrize("reward", [1, np.float32(0.25), np.int64(3), Fraction(1, 4)])
def test_a_reward_of_another_kind_of_number_is_that_number(reward):
    found = line(reward).move("on").reward
    assert (type(found), found) == (float, reward)


@pytest.mark.parametrize("taken", [("seen", 0.0, True, {}), None, ({"seen": 1}, 0.0, True, False, {})])
def test_a_game_that_keeps_another_interface_is_named(taken):
    class Old:
        def reset(self, seed=None):
            return "begun", {}

        def step(self, action):
            return taken

    game = StringGame("old", Old(), None)
    assert game.reset(0) == "begun"
    with pytest.raises(EpisodeError, match="old: "):
        game.move("go")


async def test_the_reward_is_the_sum_and_a_tool_call_is_answered():
    environment = GymEnvironment(COUNTER, sample_task(COUNTER, Split.TRAIN, 0, 0))
    await environment.start()
    called = await environment.step(Message(Role.ASSISTANT, "", (ToolCall("c", "more"),)))
    assert [(message.role, message.tool_call_id) for message in called.messages] == [(Role.TOOL, "c")]
    ends = [(await environment.step(Message(Role.ASSISTANT, "more"))).is_done for _ in range(3)]
    assert ends == [False, False, True]
    assert (await environment.score()).reward == 0.25 + 0.25 + 0.5


def test_no_seed_is_of_both_splits_and_held_out_ones_are_the_same_for_every_run():
    seeds = {
        (s, run): [sample_task(COUNTER, s, n, run).payload["seed"] for n in range(200)] for s in Split for run in (0, 1)
    }
    assert seeds[Split.HELDOUT, 0] == seeds[Split.HELDOUT, 1]
    assert not set(seeds[Split.TRAIN, 0]) & (set(seeds[Split.TRAIN, 1]) | set(seeds[Split.HELDOUT, 0]))


def test_instances_that_draw_from_the_global_generators_neither_disturb_each_other_nor_anybody_else():
    def draw() -> tuple[float, float]:
        return random.random(), float(np.random.random())

    alone = OwnChance(3)
    with alone:
        expected = [draw(), draw()]
    random.seed(1)
    np.random.seed(1)
    undisturbed = [draw(), draw()]
    random.seed(1)
    np.random.seed(1)
    first, second = OwnChance(3), OwnChance(3)
    found: dict[OwnChance, list[tuple[float, float]]] = {first: [], second: []}
    outside = []
    for _ in range(2):
        for chance, drawn in found.items():
            with chance:
                drawn.append(draw())
        outside.append(draw())
    assert list(found.values()) == [expected, expected]
    assert outside == undisturbed


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    with pytest.raises(ConfigError, match=r"pip install 'gymnasium==1\.4\.\*'"):
        check_game(GymOptions())
    assert definition.experts["gold"].can_play(COUNTER) is False
