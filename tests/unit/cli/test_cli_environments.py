from __future__ import annotations

import pytest
from typer.testing import CliRunner, Result

from agentrl.cli.main import app

BROKEN = "agentrl.testing.broken_environments:"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["env", *arguments])


def test_a_check_prints_a_line_for_each_promise_and_ends_well():
    result = call("check", BROKEN + "sound", "--tasks", "4")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert [line[1] for line in lines if line[:1] == ["✓"]][:3] == ["tasks", "tools", "rewards"]
    assert ["-", "sessions", "not", "declared"] in lines
    assert result.output.endswith(f"{BROKEN}sound keeps what it promises\n")


def test_a_broken_promise_is_printed_with_its_remedy_and_ends_with_one():
    result = call("check", BROKEN + "unreachable", "--tasks", "4")
    assert result.exit_code == 1
    assert "✗ floor and ceiling  random 0.00, gold 0.00: there is nothing to learn" in result.output
    assert "→ look at the reward" in result.output
    assert result.output.endswith("1 of 11 checks failed\n")


def test_an_episode_is_printed_as_it_is_played():
    result = call("run", BROKEN + "sound", "--policy", "gold", "--episodes", "2")
    assert result.exit_code == 0, result.output
    first = result.output.split("sound/train/1")[0]
    assert "user  how often is there an e in" in first
    assert "tools: count" in first
    assert 'assistant  count({"letter": "e"})' in first
    assert "reward 1" in first
    assert result.output.endswith("mean reward 1.000 of 2 episodes\n")


def test_a_failed_episode_says_where():
    result = call("run", BROKEN + "strict")
    assert result.exit_code == 0, result.output
    assert "failed  environment(score): ValueError: invalid literal for int()" in result.output
    assert "broken_environments.py" in result.output, "the traceback"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "sqll"), "error: no plugin 'sqll' in agentrl.environments; did you mean 'sql'?"),
        (("run", "sql", "--policy", "gold"), "error: environment 'sql' has no expert 'gold'; it has expert, clumsy"),
        (("run", "sql", "--options", "{"), "error: --options is not JSON"),
        (("check", "sql", "--options", "[1]"), "error: --options is list; write an object"),
        (("check", "sql", "--options", '{"num_row": 3}'), "unknown key 'num_row'; did you mean 'num_rows'?"),
        (
            ("run", "sql", "--policy", "http://127.0.0.1:9/v1"),
            "error: the policy at http://127.0.0.1:9/v1 gave no answer",
        ),
    ],
)
def test_what_is_wrong_is_said_on_a_line(arguments: tuple[str, ...], said: str):
    result = call(*arguments)
    assert result.exit_code == 1
    assert said in result.output
    assert "Traceback" not in result.output
