"""Which rules of credit a recipe may ask for, and what the batches of its policies get by them."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest

from agentrl.algorithms.credit_config import credit_columns
from agentrl.buffer.episode_buffer import BufferTerms, EnvironmentTerms, MemoryBuffer
from agentrl.buffer.group import Group
from agentrl.buffer.ledger import Ledger
from agentrl.buffer.recovery import TakenStep
from agentrl.config.base import parse_config
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.replay_plan import ReplayPlan
from agentrl.protocols import Scorer
from agentrl.scorers.definition import ScorerDefinition, ScorerSetting, TurnScorerConfig
from agentrl.testing.builders import InstantTasks, build_episode, build_ticket
from agentrl.types.batch import CreditColumns, TrainBatch
from agentrl.types.episode import Episode
from agentrl.types.errors import ConfigError
from agentrl.types.score import scored_turns
from agentrl.types.task import Split, Task
from agentrl.types.turn_score import TurnScore
from agentrl.types.version import PolicyVersion

V0 = PolicyVersion(0, 0)


async def _build(config: TurnScorerConfig, setting: ScorerSetting) -> Scorer:
    raise NotImplementedError("only its configuration is read here")


TURNS = ScorerDefinition("turns", "a kind of scorers of turns", TurnScorerConfig, _build)
SHAPING = {"kind": "shaping", "scorer": "prm"}
TEACHER = {"kind": "teacher", "scorer": "big"}


def config(credit: dict[str, Any], *scorers: str, **sections: Any) -> RunConfig:
    """A recipe whose environment has scorers of turns of these names."""
    of_turns = [{"kind": f"{__name__}:TURNS", "name": name} for name in scorers]
    algorithm = {"advantage": "leave_one_out", "credit": credit}
    table = {
        "name": "test",
        "steps": 1,
        "policies": {"main": {"model": "/model", "algorithm": algorithm}},
        "environment": {"name": "sql", "scorers": [{"kind": "verifier"}, *of_turns]},
        **sections,
    }
    return parse_config(RunConfig, table, "recipe.toml")


@pytest.mark.parametrize("credit", [SHAPING, TEACHER, {"kind": "turn_leave_one_out", "scorer": "prm"}])
def test_a_scorer_that_no_environment_of_the_policy_has_is_named(credit):
    wanted = credit["scorer"]
    refusal = rf"credit\.scorer: environments\.sql has no scorer of turns '{wanted}', only \['other'\]; add one to"
    with pytest.raises(ConfigError, match=refusal):
        config(credit, "other")
    assert config(credit, "other", wanted).policies["main"].algorithm.credit.scorer == wanted
    with pytest.raises(ConfigError, match="has no scorer of turns 'verifier'"):
        config({**credit, "scorer": "verifier"})


def test_an_episode_waits_for_the_scorer_that_its_credit_goes_by_and_for_no_other_without_weight():
    assert config(SHAPING, "prm", "other").required_scorers("sql") == ("verifier", "prm")
    assert config({"kind": "outcome"}, "prm", "other").required_scorers("sql") == ("verifier",)


@pytest.mark.parametrize("credit", [{"kind": "outcome"}, {"kind": "same_state"}, {"kind": "turn_leave_one_out"}])
def test_rules_that_name_no_scorer_need_none(credit):
    assert credit_columns(config(credit).policies["main"].algorithm.credit).scorer == ""


@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"temperature": 0}, {"top_k": 20}])
def test_a_teacher_is_compared_with_the_very_distribution_that_it_judges(sampling):
    rollout = {"rollout": {"sampling": sampling}}
    with pytest.raises(ConfigError, match=r"sample so, with temperature 1, without top_k and with top_p 1"):
        config(TEACHER, "big", **rollout)
    assert config(SHAPING, "prm", **rollout).is_deterministic is False


@pytest.mark.parametrize("credit", [SHAPING, TEACHER, {"kind": "turn_leave_one_out"}])
def test_groups_are_not_chosen_by_the_outcome_where_their_scores_count(credit):
    chosen = {"buffer": {"group_filter": "spread"}}
    with pytest.raises(ConfigError, match=r'also learns from groups whose rewards .*set buffer\.group_filter = "none"'):
        config(credit, "prm", "big", **chosen)
    assert config({"kind": "outcome"}, **chosen).buffer.group_filter == "spread"


def scored_episode(member: int) -> Episode:
    episode = build_episode(
        build_ticket(f"train-000000-{member}", member=member), [(2, 0), (1, 0)], reward=float(member)
    )
    scores = tuple(TurnScore(turn.key, "prm:1", value=0.25 + member, prior=0.5) for turn in scored_turns(episode))
    return dataclasses.replace(episode, turn_scores={"prm": scores})


def columns(batch: TrainBatch) -> list[list[float]]:
    return [t.potentials.tolist() for e in batch.episodes for t in e.trajectories]


def test_a_step_that_is_taken_retaken_or_replayed_has_the_same_columns():
    recipe = config(SHAPING, "prm", buffer={"group_size": 2, "groups_per_step": 1})
    wanted = credit_columns(recipe.policies["main"].algorithm.credit)
    assert wanted == CreditColumns(potentials="prm", turn_rewards=True)
    terms = BufferTerms(
        {"main": recipe.buffer}, {"fake": EnvironmentTerms(1.0, ("main",))}, {"main": V0}, 0, 4, 1, 9,
        columns={"main": wanted},
    )  # fmt: skip

    async def play() -> tuple[TrainBatch, TrainBatch]:
        tasks = InstantTasks(lambda ordinal: Task("fake", Split.TRAIN, ordinal))
        buffer = MemoryBuffer(terms, tasks, {}, Ledger([].append))
        for _ in range(2):
            ticket = await buffer.admit()
            await buffer.settle(dataclasses.replace(scored_episode(ticket.member), ticket=ticket))
        batch = await buffer.take("main", V0)
        return batch, await buffer.retake(taken)

    episodes = [scored_episode(member) for member in range(2)]
    group = Group(0, episodes[0].ticket.task, 2, {"main": 0}, episodes=episodes)
    taken = TakenStep("main", V0, (group,))
    first, again = asyncio.run(play())
    replayed = ReplayPlan("main", 1, V0, None, (taken,)).batch(recipe, taken, V0)
    # Prompt of 3, reply of 2, context of 2, reply of 1.
    assert columns(first) == columns(again) == columns(replayed) == [[0, 0, 0, 0.5, 0.5, 0, 0, 0.5]] * 2
    assert np.concatenate([t.turn_rewards for e in first.episodes for t in e.trajectories]).tolist() == [0.0] * 16


BIG = {"main": {"model": "/model"}, "big": {"model": "/big", "frozen": True}}
ASKS_BIG = {"kind": "teacher", "name": "teacher", "policy": "big"}


def scored_by(*scorers: dict[str, Any], **sections: Any) -> RunConfig:
    """A recipe whose environment has the verifier and these scorers."""
    environment = {"name": "sql", "scorers": [{"kind": "verifier"}, *scorers]}
    table = {"name": "test", "steps": 1, "policies": BIG, "environment": environment, **sections}
    return parse_config(RunConfig, table, "recipe.toml")


def test_a_frozen_policy_that_a_scorer_asks_needs_no_agent():
    recipe = scored_by(ASKS_BIG)
    assert recipe.agents_of("sql") == {"agent": "main"}
    assert recipe.acting == ("main",), "evaluations start no engine for the other"
    assert (recipe.trained, recipe.trained_in("sql"), recipe.played_by("big")) == (("main",), ("main",), ())


def test_a_frozen_policy_that_nobody_asks_needs_one():
    with pytest.raises(ConfigError, match="agents is missing: it says which agent acts by which"):
        scored_by()


def test_a_policy_that_a_scorer_asks_may_act_where_it_is_said_to():
    agents = {"one": "main", "other": "big"}
    environment = {"name": "sql", "scorers": [{"kind": "verifier"}, ASKS_BIG], "agents": agents}
    assert scored_by(environment=environment).agents_of("sql") == agents


def test_a_self_teacher_judges_its_own_policy_alone_and_follows_none_that_is_frozen():
    own = {"kind": "self_teacher", "name": "self", "policy": "main"}
    agents = {"one": "main", "other": "big"}
    environment = {"name": "sql", "scorers": [{"kind": "verifier"}, own], "agents": agents}
    (scorer,) = scored_by(environment=environment).turn_scorers()
    assert (scorer.snapshots_of(), scorer.uses_policies(), scorer.policies) == ("main", (), ("main",))
    with pytest.raises(ConfigError, match="scorer 'self' follows policy 'big', which is frozen: take kind teacher"):
        scored_by(ASKS_BIG, {**own, "policy": "big"})


def of_turns(name: str, **options: Any) -> dict[str, Any]:
    return {"kind": f"{__name__}:TURNS", "name": name, **options}


def sum_of(name: str, *parts: str, **options: Any) -> dict[str, Any]:
    return {"kind": "combined", "name": name, "parts": dict.fromkeys(parts, 1.0), **options}


@pytest.mark.parametrize(
    ("scorers", "required"),
    [
        ([of_turns("idle")], ()),
        ([of_turns("weighed", weight=0.5), of_turns("idle")], ("weighed",)),
        ([of_turns("waits", late="wait"), of_turns("drops", late="drop")], ("waits", "drops")),
        ([of_turns("part"), sum_of("all", "part")], ()),
        ([of_turns("part"), of_turns("idle"), sum_of("all", "part", weight=0.5)], ("part", "all")),
        ([sum_of("outer", "inner", weight=0.5), sum_of("inner", "part"), of_turns("part")], ("outer", "inner", "part")),
    ],
)
def test_required_is_what_a_reward_needs_and_what_that_is_made_of(scorers, required):
    agents = {"one": "main", "other": "big"}
    environment = {"name": "sql", "scorers": [{"kind": "verifier"}, *scorers], "agents": agents}
    assert scored_by(environment=environment).required_scorers("sql") == ("verifier", *required)


def test_what_a_credit_needs_is_required():
    assert config(SHAPING, "prm", "other").required_scorers("sql") == ("verifier", "prm")
