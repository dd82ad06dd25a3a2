from __future__ import annotations

import pytest

from agentrl.types.errors import ConfigError
from agentrl.types.task import Split
from agentrl_environments.textworld.environment import cleaned, command_of
from agentrl_environments.textworld.games import TextWorldOptions, check_package, sample_task


@pytest.mark.parametrize(
    ("reply", "command"),
    [
        ("go west", "go west"),
        ("I need the key.\n take key from box \n\n", "take key from box"),
        ("öpen door\x00", "pen door"),
        ("look " * 100, ("look " * 20)[:100]),
        ("", None),
        ("...", None),
        ("save", None),
        ("look. Restore", None),
        ("tw-trace-actions", None),
        ("restrict commands", None),
        ("take manuscript", "take manuscript"),
    ],
)
def test_the_last_line_is_the_command_unless_it_is_one_to_the_interpreter(reply, command):
    assert command_of(reply) == command


def test_prompt_and_status_line_are_cut_off_what_a_game_says():
    said = "\nYou open it.\n\n \n\nA bell rings > twice.\n\n>                 -= Dish-Pit =-0/12"
    assert cleaned(said) == "You open it.\n\nA bell rings > twice."


def test_no_seed_is_of_both_splits_and_held_out_ones_are_the_same_for_every_run():
    options = TextWorldOptions()
    seeds = {
        (s, run): [sample_task(options, s, n, run).payload["seed"] for n in range(200)] for s in Split for run in (0, 1)
    }
    assert seeds[Split.HELDOUT, 0] == seeds[Split.HELDOUT, 1]
    assert not set(seeds[Split.TRAIN, 0]) & (set(seeds[Split.TRAIN, 1]) | set(seeds[Split.HELDOUT, 0]))
    assert len(set(seeds[Split.TRAIN, 0])) == 200


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    with pytest.raises(ConfigError, match=r"pip install 'textworld==1\.7\.0'"):
        check_package(TextWorldOptions())
