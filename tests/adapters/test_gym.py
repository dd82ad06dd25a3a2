"""Games of Gymnasium, gem and a function, through the adapter and by their packages alone."""

from __future__ import annotations

import re

import pytest

from agentrl.types.errors import ConfigError, EpisodeError
from agentrl.types.task import Split
from tests.adapters.packaged import checked, hosted, own_play, played

pytestmark = pytest.mark.usefixtures("beside_packages")
LAKE = {"game": "FrozenLake-v1", "arguments": {"map_name": "4x4", "is_slippery": True}}
ACTIONS = ("left", "down", "right", "up")
COUNTER = "tests.adapters.packages_side.counter:make"


async def test_a_game_of_gymnasium_goes_as_it_does_without_the_adapter(tmp_path):
    replies = ["right", "I go down.", "right, since left is worse: down", "up"]
    async with hosted("gym", tmp_path, **LAKE) as host:
        (task,) = await host.sample(Split.TRAIN, 0, [5])
        said, is_done, score = await played(host, task, replies)
    own = own_play(package="gymnasium", seed=task.payload["seed"], actions=[2, 1, 1, 3], **LAKE)
    places = [own[0], *(seen for seen, _, _ in own[1:])]
    maps = [text.rpartition("\n\n")[2].replace("\n", "").index("@") for text in said]
    assert (maps, is_done, score.reward) == (places, own[-1][2], sum(reward for _, reward, _ in own[1:]))


async def test_no_map_of_a_held_out_lake_is_trained(tmp_path):
    async with hosted("gym", tmp_path, arguments={"size": 3}) as host:
        maps = {}
        for split in Split:
            tasks = await host.sample(split, 0, range(15))
            maps[split] = {(await played(host, task, []))[0][0] for task in tasks}
        again = await host.sample(Split.HELDOUT, 7, range(15))
        assert again == tasks
    assert len(maps[Split.TRAIN]) > 5
    assert not maps[Split.TRAIN] & maps[Split.HELDOUT]


@pytest.mark.parametrize("game", ["game:GuessTheNumber-v0-hard", "game:Game2048-v0-easy"])
async def test_a_game_of_gem_draws_what_it_draws_alone_though_others_draw_meanwhile(tmp_path, game):
    actions = ["\\boxed{25}", "\\boxed{12}", "\\boxed{40}"] if "Guess" in game else ["\\boxed{up}", "\\boxed{left}"] * 3
    async with hosted("gym", tmp_path, source="gem", game=game) as host:
        task, other = await host.sample(Split.TRAIN, 0, [0, 1])
        said, _, score = await played(host, task, actions)
        assert (await played(host, task, actions))[0] == said != (await played(host, other, actions))[0]
    own = own_play(package="gem", game=game, seed=task.payload["seed"], actions=actions)
    assert said == [own[0], *(seen for seen, _, _ in own[1:])]
    assert score.reward == pytest.approx(sum(reward for _, reward, _ in own[1:]))


async def test_a_function_makes_a_game_and_a_reward_that_is_no_number_is_named(tmp_path):
    async with hosted("gym", tmp_path, source="factory", game=COUNTER, arguments={"goal": 2}) as host:
        (task,) = await host.sample(Split.TRAIN, 0, [0])
        said, is_done, score = await played(host, task, ["more", "more"])
        assert said == [f"0 of 2, seed {task.payload['seed']}", "1", "2"]
        assert (is_done, score.reward) == (True, 0.75)
        for wrong in ("None", "nan", "True"):
            with pytest.raises(EpisodeError, match=rf"counter:make gave the reward {wrong}, not a finite number"):
                await played(host, task, [wrong])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"game": "FrozenLak-v1"}, "gymnasium has no game 'FrozenLak-v1'.*FrozenLake-v1"),
        ({"source": "gem", "game": "rg:n_queens"}, "answers evaluated as Python; play it by the environment reasoning"),
        ({"arguments": {"size": 1}}, "a number of fields, 2 at least, not 1"),
        ({"arguments": {"map_name": "9x9"}}, "has no such argument: '9x9'"),
        ({"source": "gem", "game": "game:Mastermnd"}, "gem has no game 'game:Mastermnd'.*game:Mastermind-v0"),
        ({"source": "factory", "game": "no_such:make"}, "no_such:make cannot be imported"),
        ({"game": "Taxi-v4", "arguments": {"colour": 1}}, "Taxi-v4 cannot be made with these arguments"),
        ({"game": "MountainCarContinuous-v0"}, "is played by Box.*source = .factory."),
    ],
)
async def test_what_is_not_there_is_named_before_a_run_begins(tmp_path, options, message):
    with pytest.raises((ConfigError, EpisodeError), match=message):
        async with hosted("gym", tmp_path, **options):
            pass


def test_the_environment_keeps_what_it_must():
    options = '{"game": "FrozenLake-v1", "arguments": {"is_slippery": false}}'
    said = checked("agentrl_environments.gym:definition", "--tasks", "4", "--options", options)
    assert re.search(r"gold 1\.00", said), said
