from __future__ import annotations

import dataclasses
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest

from agentrl.testing.builders import build_episode, build_ticket
from agentrl.types.batch import TrainBatch, TrainEpisode, TrainTrajectory
from agentrl.types.environment import Opening, Score, StepResult, check_opening, check_score, check_step
from agentrl.types.episode import Node, SampledColumns
from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.generation import KeptTokens, Sampling
from agentrl.types.message import Message, Role
from agentrl.types.task import Split, Task
from agentrl.types.trajectory import build_trajectories
from agentrl.types.version import PolicyVersion, VersionSpan

WHOLE = (VersionSpan(PolicyVersion(0, 1), 0, 3),)
SHORT = (VersionSpan(PolicyVersion(0, 1), 0, 2),)
HELLO = Message(Role.USER, "hello")


def node(**changes) -> Node:
    columns = {"logprobs": np.array([-0.1, -0.2, 0.0], np.float32), "versions": WHOLE, "kv_versions": WHOLE}
    return Node(4, 3, "agent", 1, np.array([7, 8, 9], np.int32), SampledColumns(**{**columns, **changes}))


def test_a_node_whose_columns_fit_breaks_no_law():
    assert node(kept_tokens=KeptTokens.from_lists([[7], [8, 1], [9]])).check() is None


def test_a_context_node_has_no_law_to_break():
    assert dataclasses.replace(node(), sample=None).check() is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logprobs": np.array([-0.1, -0.2], np.float32)}, "2 logprobs for 3 tokens"),
        ({"logprobs": np.array([-0.1, np.nan, 0], np.float32)}, "not finite"),
        ({"logprobs": np.array([-0.1, -np.inf, 0], np.float32)}, "not finite"),
        ({"logprobs": np.array([-0.1, 0.01, 0], np.float32)}, "above 0"),
        ({"versions": SHORT}, r"versions .* do not tile 3"),
        ({"kv_versions": SHORT}, r"kv_versions .* do not tile 3"),
        ({"kept_tokens": KeptTokens.from_lists([[7], [8]])}, "2 kept sets for 3 tokens"),
    ],
)
def test_a_node_that_breaks_an_alignment_law_says_which_and_where(changes, words):
    breach = node(**changes).check()
    assert breach is not None
    assert breach.startswith("node 4: ")
    assert re.search(words, breach)


@pytest.mark.parametrize("reward", [None, 0, 1, -0.5, 1e30])
def test_a_reward_that_is_none_or_finite_passes_unchanged(reward):
    score = Score(reward, {"rows": 3})
    assert check_score(score) is score


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, "1", True, [1.0], np.float64(1.0)])
def test_a_reward_that_is_no_plain_finite_number_is_a_fault_of_the_environment(reward):
    with pytest.raises(EpisodeError) as caught:
        check_score(Score(reward))
    assert (caught.value.failure.boundary, caught.value.failure.kind) == (Boundary.ENVIRONMENT, "reward")


@pytest.mark.parametrize("metrics", [{"reward": 1.0}, {"reward": None}])
def test_a_metric_of_the_same_name_does_not_hide_a_reward(metrics):
    with pytest.raises(EpisodeError, match="reward is"):
        check_score(Score(math.nan, metrics))


@pytest.mark.parametrize("metric", [math.nan, None, "3", False])
def test_a_metric_that_is_no_finite_number_is_refused_by_name(metric):
    with pytest.raises(EpisodeError, match="rows is"):
        check_score(Score(1.0, {"rows": metric}))


@pytest.mark.parametrize("answer", [1.0, None, {"reward": 1.0}, SimpleNamespace(reward=1.0, metrics={})])
def test_a_score_of_another_kind_is_refused(answer):
    with pytest.raises(EpisodeError, match="not a Score"):
        check_score(answer)


def test_good_answers_pass_unchanged():
    opening, step, end = Opening((HELLO,)), StepResult((HELLO,)), StepResult(is_done=True)
    assert check_opening(opening) is opening
    assert check_step(step) is step
    assert check_step(end) is end


@pytest.mark.parametrize(
    "opening", [None, HELLO, Opening(()), Opening([HELLO]), Opening(("hi",)), Opening((Message(Role.USER, None),))]
)
def test_an_opening_without_proper_messages_is_a_fault_of_the_environment(opening):
    with pytest.raises(EpisodeError) as caught:
        check_opening(opening)
    assert (caught.value.failure.boundary, caught.value.failure.kind) == (Boundary.ENVIRONMENT, "answer")


@pytest.mark.parametrize("step", [None, (HELLO,), StepResult(), StepResult([HELLO]), StepResult((b"x",), True)])
def test_a_step_without_proper_messages_is_a_fault_of_the_environment(step):
    with pytest.raises(EpisodeError) as caught:
        check_step(step)
    assert (caught.value.failure.boundary, caught.value.failure.kind) == (Boundary.ENVIRONMENT, "answer")


def test_an_episode_counts_its_tokens_by_node():
    episode = build_episode(build_ticket(), [(4, 0), (2, 1)])
    assert (episode.num_tokens, episode.num_sampled_tokens) == (3 + 4 + 2 + 2, 6)
    assert episode.policy_of("agent") == "main"


def test_a_batch_counts_sampled_and_trained_tokens_apart():
    (trajectory,) = build_trajectories(build_episode(build_ticket(), [(4, 0), (2, 1)]))
    mask = trajectory.sampled & (trajectory.turns == 1)
    trained = TrainTrajectory(trajectory, mask, np.zeros(len(mask), np.int32))
    episodes = (TrainEpisode("a", 0, 1.0, (trained,)), TrainEpisode("b", 0, 0.0, ()))
    batch = TrainBatch("main", PolicyVersion(0, 1), episodes)
    assert (batch.num_sampled_tokens, batch.num_trained_tokens) == (6, 2)


def test_a_task_is_named_by_environment_split_and_ordinal():
    assert Task("sql", Split.TRAIN, 7).id == "sql/train/7"
    assert Task("sql", Split.HELDOUT, 7).id == "sql/heldout/7"


@pytest.mark.parametrize(
    ("sampling", "truncates"), [(Sampling(), False), (Sampling(0.7), False), (Sampling(1.0, 20), True)]
)
def test_sampling_says_whether_it_truncates(sampling, truncates):
    assert sampling.truncates is truncates


def test_a_turns_reward_does_not_hide_an_agents_of_the_same_name():
    with pytest.raises(EpisodeError, match="reward of agent 0 is nan"):
        check_score(Score(1.0, agent_rewards={"0": math.nan}, turn_rewards={0: 1.0}))
