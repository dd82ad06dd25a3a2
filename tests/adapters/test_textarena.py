"""Games of TextArena, played by the real package in an interpreter of its own."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from agentrl.checking.playing import PlayedEpisode, replay
from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.hosting import build_host
from agentrl.journal.archive_file import read_consumed
from agentrl.testing.tiny import TINY_SHAPE, make_tiny_model
from agentrl.types.errors import Boundary, ConfigError
from agentrl.types.message import Message, Role
from agentrl.types.task import Split
from tests.adapters.conftest import ROOT, packages_python
from tests.adapters.trained import train

pytestmark = pytest.mark.usefixtures("beside_packages")
CALL_S = 60.0
CONTEXT_TOKENS = 4096  # rules of a game are long, and the tiny tokenizer makes a token of nearly each letter
SIDE = ROOT / "tests/adapters/packages_side"
AGENTS = ("first", "second")
# What each game is told; of GuessTheNumber and KuhnPoker chance says where that leads.
GAMES = {
    "GuessTheNumber-v0": (1, ("[10]", "[5]", "[what?]", "[15]", "[10]", "[10]")),
    "FrozenLake-v0-random": (1, ("[down]", "[right]", "[down]", "[right]", "[down]", "[right]")),
    "Nim-v0": (2, ("[0 3]", "[1 3]", "[9 9]", "[2 4]", "[1 1]", "[2 1]")),
    "KuhnPoker-v0": (2, ("[check]", "[bet]", "[call]", "[bet]", "[fold]", "[check]", "[check]", "[bet]", "[call]")),
    "ConnectFour-v0": (2, ("[col 0]", "[col 1]", "[col 0]", "[col 1]", "[col 0]", "[col 1]", "[col 0]")),
}


def recipe(options: str, agents: str = "") -> str:
    return (
        f'[environment]\nname = "textarena"\ninterpreter = "{packages_python()}"\noptions = {options}\n'
        f'{agents}\n[environment.scaffold]\nname = "turn_taking"'
    )


def config(**options: object) -> EnvironmentConfig:
    return EnvironmentConfig(name="textarena", interpreter=packages_python(), options=options)


async def played(folder: Path, game: str, *actions: str) -> PlayedEpisode:
    host = await build_host(config(game=game), CALL_S, folder)
    try:
        (task,) = await host.sample(Split.TRAIN, 0, [0])
        return await replay(host, task, [Message(Role.ASSISTANT, action) for action in actions])
    finally:
        await host.close()


def by_the_package(seed: int, game: str, players: int, *actions: str) -> dict[str, object]:
    command = [packages_python(), SIDE / "textarena_player.py", game, seed, players, *actions]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def read_so_far(episode: PlayedEpisode, players: int) -> list[object]:
    """At each turn who reads, and all that it has read by then with its own actions, as TextArena writes it."""
    texts: dict[int, str] = defaultdict(str)
    agent, messages = episode.opening.agent, episode.opening.messages
    found: list[object] = []
    for step in episode.steps:
        player = 0 if agent is None else AGENTS.index(agent)
        texts[player] += "".join(f"\n{message.content}" for message in messages)
        found.append([player, texts[player]])
        texts[player] += f"\n[{'Player' if players == 1 else f'Player {player}'}] {step.action.content}"
        agent, messages = step.result.agent, step.result.messages
    return found


@pytest.mark.parametrize("game", GAMES)
async def test_agents_read_what_textarena_shows_and_get_its_rewards(game, tmp_path):
    players, actions = GAMES[game]
    ours = await played(tmp_path, game, *actions)
    theirs = by_the_package(ours.task.payload["seed"], game, players, *actions)
    assert read_so_far(ours, players) == theirs["seen"]
    rewards = [ours.score.reward] if players == 1 else [ours.score.agent_rewards[agent] for agent in AGENTS]
    assert rewards == (theirs["rewards"] or [0.0] * players)
    assert ours.score.metrics["finished"] == float(theirs["rewards"] is not None)


async def test_whoever_takes_the_last_object_wins_and_the_other_one_loses(tmp_path):
    episode = await played(tmp_path, "Nim-v0", "[0 3]", "[1 4]", "[2 5]")
    assert [step.agent for step in episode.steps] == ["first", "second", "first"]
    assert (episode.score.reward, episode.score.agent_rewards) == (1.0, {"first": 1.0, "second": -1.0})


async def test_a_reward_that_is_no_number_is_refused_by_name(tmp_path):
    episode = await played(tmp_path, "Countdown-v0", "nothing", "nothing")
    assert episode.score is None
    assert (episode.failure.boundary, episode.failure.kind) == (Boundary.ENVIRONMENT, "reward")
    assert "reward is 'Invalid action format" in episode.failure.message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"game": "Nimm-v0"}, r"no game 'Nimm-v0'; it has .*Nim-v0.* and their variants"),
        ({"game": "Wordle-v0"}, r"'Wordle-v0' cannot be played here .*LookupError: Resource 'words' not found"),
        ({"game": "TwentyQuestions-v0"}, r"'TwentyQuestions-v0' cannot be played here .*OpenRouter API key not found"),
        ({"game": "ThreePlayerIPD-v0"}, r"by one or two: AssertionError: .*exactly three players"),
        ({"game": "Nim-v0", "heldout_game": "Sudoku-v0"}, r"numbers of players: {'Nim-v0': 2, 'Sudoku-v0': 1}"),
    ],
)
async def test_a_game_that_cannot_be_played_is_named_before_anything_is_played(options, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        await build_host(config(**options), CALL_S, tmp_path)


def test_the_package_that_is_missing_is_named_with_the_command_that_installs_it(tiny_model, tmp_path):
    with pytest.raises(AssertionError, match=r"textarena is not installed .*pip install 'textarena==0\.7\.4'"):
        train(tmp_path, tiny_model, '[environment]\nname = "textarena"')


def test_env_check_finds_that_it_keeps_what_it_promises():
    command = [packages_python(), "-m", "agentrl.cli.main", "env", "check", "agentrl_environments.textarena:definition"]
    done = subprocess.run(
        [*map(str, command), "--tasks", "4"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "random 0.00, gold 1.00" in done.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TINY_SHAPE.model_copy(update={"context_tokens": CONTEXT_TOKENS})
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", shape=shape)


LIMITS = (
    "rollout.limits.max_turns=4",
    f"rollout.limits.max_context_tokens={CONTEXT_TOKENS}",
    "rollout.limits.tool_s=60",
)


def test_a_game_of_one_player_is_trained(model, tmp_path):
    trained = train(tmp_path, model, recipe('{ game = "GuessTheNumber-v0" }'), *LIMITS)
    assert {line["task"].split("/")[0] for line in trained.ledger} == {"textarena"}
    assert max(line["turns"] for line in trained.ledger) > 1, "no reply reached the game"
    print(json.dumps(trained.ledger[-1]))


def test_a_game_is_trained_in_which_both_agents_act(model, tmp_path):
    agents = 'agents = { first = "main", second = "main" }'
    trained = train(tmp_path, model, recipe('{ game = "TruthAndDeception-v0" }', agents), *LIMITS)
    episodes = [e for file in (trained.folder / "episodes").glob("consumed-*.parquet") for e in read_consumed(file)]
    lines = {line["episode_id"]: line for line in trained.ledger}
    both = [e for e in episodes if e.episode_id in lines and {turn.agent for turn in e.turns} == set(AGENTS)]
    assert both, "no reply reached the other agent"
    # The length is of the episode, the same for both; what is left is 1 and -1, or twice 0 of a game that did not end.
    apart = {round(episode.agent_rewards["first"] - episode.agent_rewards["second"], 6) for episode in both}
    assert apart <= {-2.0, 0.0, 2.0}
    print(json.dumps(lines[both[-1].episode_id]))
