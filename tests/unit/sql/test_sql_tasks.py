from __future__ import annotations

import random

import pytest

from agentrl.envs.definition import load_environment
from agentrl.types.errors import ConfigError
from agentrl.types.message import Message, Role
from agentrl.types.task import Split
from agentrl_environments.splits import split_of
from agentrl_environments.sql import definition
from agentrl_environments.sql.database import Database
from agentrl_environments.sql.experts import EXPERTS
from agentrl_environments.sql.names import FIRST_WORDS, SECOND_WORDS, identifiers
from agentrl_environments.sql.tasks import KINDS, SqlOptions, build_problem, sample_task
from tests.expert_play import mean_reward

OPTIONS = SqlOptions()


def problems(split: Split, count: int, seed: int = 0):
    return [build_problem(OPTIONS, sample_task(OPTIONS, split, n, seed).payload["seed"], split) for n in range(count)]


@pytest.mark.parametrize("split", list(Split))
async def test_the_expert_is_always_right(split):
    assert await mean_reward(definition, OPTIONS, "expert", 400, split) == 1.0


async def test_the_clumsy_expert_is_right_about_28_times_in_100():
    assert 0.25 < await mean_reward(definition, OPTIONS, "clumsy", 1500) < 0.31


async def test_chance_is_almost_never_right():
    assert await mean_reward(definition, OPTIONS, "random", 1000) < 0.02


def test_equal_arguments_give_equal_tasks_and_problems():
    assert problems(Split.TRAIN, 20) == problems(Split.TRAIN, 20)
    build_problem.cache_clear()
    again = problems(Split.TRAIN, 20)
    assert again == problems(Split.TRAIN, 20)
    assert [p.question for p in again] != [p.question for p in problems(Split.TRAIN, 20, seed=1)]


def test_held_out_tasks_are_the_same_whatever_the_seed():
    assert problems(Split.HELDOUT, 20, seed=1) == problems(Split.HELDOUT, 20, seed=2)


def test_held_out_names_are_never_seen_in_training_but_their_words_are():
    train, heldout = set(identifiers(Split.TRAIN)), set(identifiers(Split.HELDOUT))
    assert train & heldout == set()
    assert len(train) + len(heldout) == len(FIRST_WORDS) * len(SECOND_WORDS)
    for split, names in ((Split.TRAIN, train), (Split.HELDOUT, heldout)):
        used = {name for p in problems(split, 200) for name in (p.table, *p.columns)}
        assert used <= names
    words = {word for name in train for word in name.split("_")}
    assert {word for name in heldout for word in name.split("_")} <= words


def test_no_row_belongs_to_both_splits():
    train = {row for p in problems(Split.TRAIN, 300) for row in p.rows}
    heldout = {row for p in problems(Split.HELDOUT, 300) for row in p.rows}
    assert train & heldout == set()
    assert all(split_of(f"{row[0]} {list(row[1:])}") is Split.HELDOUT for row in heldout)


def test_every_question_has_one_answer_and_does_not_name_its_table():
    for problem in problems(Split.TRAIN, 300):
        database = Database(problem, OPTIONS)
        assert len(database.run(problem.query)) == 1
        assert problem.table not in problem.question
        assert problem.column in problem.question
        assert all(len(set(column)) == len(column) for column in zip(*problem.rows, strict=True))


def test_every_kind_of_question_is_asked():
    assert {p.kind.name for p in problems(Split.TRAIN, 300)} == {kind.name for kind in KINDS}


def test_an_expert_stays_with_the_procedure_that_it_chose():
    task = sample_task(OPTIONS, Split.TRAIN, 0, 0)
    conversation = [Message(Role.USER, "question"), Message(Role.ASSISTANT, ""), Message(Role.TOOL, "ada")]
    for seed in range(30):
        first = EXPERTS["clumsy"].act(OPTIONS, task, conversation[:1], random.Random(seed))
        second = EXPERTS["clumsy"].act(OPTIONS, task, conversation, random.Random(seed))
        is_assume = bool(first.tool_calls) and "data" in str(first.tool_calls[0].arguments)
        assert not is_assume or second.content == "unknown"


def test_the_environment_is_registered_and_refuses_unknown_options_and_experts():
    definition = load_environment("sql")
    with pytest.raises(ConfigError, match=r"unknown key 'num_row'; did you mean 'num_rows'\?"):
        definition.parse_options({"num_row": 3})
    with pytest.raises(ConfigError, match="no expert 'master'; it has expert, clumsy, random"):
        definition.expert("master")
