from __future__ import annotations

from importlib.metadata import version

import pytest

from agentrl.types.errors import ConfigError
from agentrl_environments.packages import Package, PackagedOptions

THERE = version("packaging")


def test_a_package_of_a_tried_version_is_imported():
    assert Package("packaging", f"=={THERE}").load("packaging.tags", PackagedOptions()).__name__ == "packaging.tags"


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    with pytest.raises(ConfigError, match=r"no-such-game is not installed.*pip install 'no-such-game==0\.7', or have"):
        Package("no-such-game", "==0.7").load("no_such_game", PackagedOptions())


def test_a_missing_package_that_needs_more_of_pip_is_not_left_to_the_run():
    with pytest.raises(ConfigError, match=r"pip install --no-deps 'no-such-game==0\.7', and name .*interpreter$"):
        Package("no-such-game", "==0.7", "--no-deps").load("no_such_game", PackagedOptions())


def test_another_version_than_was_tried_is_refused_by_name_unless_the_recipe_says_otherwise():
    package = Package("packaging", "==0.1")
    with pytest.raises(ConfigError, match=rf"packaging is {THERE}, and was tried as ==0\.1.*any_version = true"):
        package.load("packaging", PackagedOptions())
    assert package.load("packaging", PackagedOptions(any_version=True)).__name__ == "packaging"
