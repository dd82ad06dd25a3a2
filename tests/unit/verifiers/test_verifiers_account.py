"""What the environment ``verifiers`` makes of a record of verifiers, and where its tasks lie; without the package."""

from __future__ import annotations

from types import SimpleNamespace as Thing
from typing import Any

import pytest

from agentrl.types.environment import Score
from agentrl.types.errors import ConfigError
from agentrl.types.task import Split
from agentrl_environments.verifiers import definition, legacy
from agentrl_environments.verifiers.tasks import place_in_taskset
from agentrl_environments.verifiers.taskset import account

URL = "http://127.0.0.1:1/sessions/key/v1"


def trace(rewards: dict[str, Any], model: str = "main", url: str = URL, trainable: bool = True, **more: Any) -> Thing:
    """One of verifiers' traces, as far as an account needs it; rewards are ``(score, weight)`` or None."""
    given = {
        name: each and Thing(score=each[0], weight=each[1], value=each[0] * each[1]) for name, each in rewards.items()
    }
    agent = Thing(name="seat", trainable=trainable, config=Thing(model=model, client=Thing(base_url=url)))
    said = Thing(sampled=True, message=Thing(content="last"))
    found = {"metrics": {}, "errors": [], "num_turns": 2, "nodes": [said], **more}
    return Thing(rewards=given, agent=agent, **found)


def record(*traces: Thing, ok: bool = True, errors: tuple[Thing, ...] = ()) -> Thing:
    return Thing(id="r", ok=ok, errors=list(errors), traces=list(traces))


def test_the_reward_is_the_weighted_sum_and_the_scores_are_metrics():
    played = account(record(trace({"right": (1.0, 0.5), "short": (0.5, 0.2)}, metrics={"calls": 3, "none": None})), URL)
    metrics = {"reward_right": 1.0, "reward_short": 0.5, "calls": 3.0, "verifiers_turns": 2.0}
    assert played.score == Score(pytest.approx(0.6), metrics)
    assert (played.errors, played.last_words) == ((), "last")


@pytest.mark.parametrize("rewards", [{}, {"right": (1.0, 1.0), "judged": None}], ids=["no reward", "one not given"])
def test_a_reward_that_verifiers_did_not_give_is_none_and_not_zero(rewards):
    assert account(record(trace(rewards)), URL).score.reward is None


def test_agents_are_rewarded_apart_and_a_judge_elsewhere_is_none_of_ours():
    white, black = trace({"won": (1.0, 1.0)}, "white"), trace({"won": (0.0, 1.0)}, "black")
    judge = trace({"fair": (9.0, 1.0)}, "judge", url="https://elsewhere/v1")
    frozen = trace({"fair": (9.0, 1.0)}, "main", trainable=False)
    score = account(record(judge, white, frozen, black), URL).score
    assert (score.reward, score.agent_rewards) == (1.0, {"white": 1.0, "black": 0.0})


def test_two_traces_of_one_agent_are_refused_since_each_has_a_reward_of_its_own():
    (error,) = account(record(trace({"won": (1.0, 1.0)}), trace({"won": (0.0, 1.0)})), URL).errors
    assert "give each role a model of its own" in error


def test_errors_of_episode_and_traces_are_named():
    wrong = Thing(type="TaskError", message="no table")
    played = account(record(trace({"won": (1.0, 1.0)}, errors=[wrong]), ok=False), URL)
    assert (played.errors, played.score) == (("TaskError: no table",), Score(None))
    assert account(record(ok=False), URL).errors == ("verifiers calls its episode r failed, and names no error",)


def test_every_fifth_task_is_held_out_and_all_others_are_trained_on():
    train = [place_in_taskset(Split.TRAIN, n, 5, 12) for n in range(10)]
    heldout = [place_in_taskset(Split.HELDOUT, n, 5, 12) for n in range(3)]
    assert (train, heldout) == ([0, 1, 2, 3, 5, 6, 7, 8, 10, 11], [4, 9, 4])
    assert place_in_taskset(Split.HELDOUT, 2, 5, None) == 14
    with pytest.raises(ConfigError, match=r"4 tasks, and one of 5 is held out.*heldout_every to 4 or less"):
        place_in_taskset(Split.HELDOUT, 0, 5, 4)


def test_a_python_without_verifiers_is_told_how_it_is_installed():
    options = definition.parse_options({"env": {"taskset": {"id": "quiz"}}, "model": "m", "renderer": "qwen3"})
    with pytest.raises(ConfigError, match=r"verifiers is not installed.*pip install 'verifiers==0\.4\.0'"):
        definition.describe(options)


def test_a_rollout_of_verifiers_0_3_has_its_reward_or_the_error_that_it_names():
    said = [{"role": "assistant", "content": "last"}, {"role": "user", "content": "and?"}]
    output = {"reward": 0.5, "metrics": {"right": 1, "judged": None}, "trajectory": [{}, {}], "completion": said}
    played = legacy.account(output)
    assert (played.score, played.last_words) == (Score(0.5, {"right": 1.0, "verifiers_turns": 2.0}), "last")
    assert legacy.account({**output, "reward": None}).score.reward is None
    failed = legacy.account({**output, "error": {"error": "ModelError", "error_chain_str": "ModelError -> refused"}})
    assert (failed.score, failed.errors) == (Score(None), ("ModelError -> refused",))
