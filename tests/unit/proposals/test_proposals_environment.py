from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.types.environment import Score, StepResult
from agentrl.types.message import Message, Role
from agentrl.types.task import Split, Task
from agentrl_environments.proposals.environment import PROPOSER, SOLVERS, ProposalsEnvironment
from agentrl_environments.proposals.experts import act_careless, act_gold, act_timid
from agentrl_environments.proposals.problems import DIGITS, Problem, parse_problem
from agentrl_environments.proposals.tasks import ProposalsOptions, sample_task

TRAIN = Task("proposals", Split.TRAIN, 0, {"first": 3, "given": "1+1"})
HELDOUT = Task("proposals", Split.HELDOUT, 0, {"first": 3, "given": "1+1"})
OPTIONS = ProposalsOptions(max_terms=5)


async def play(task: Task, *said: str, options: ProposalsOptions = OPTIONS) -> tuple[list[StepResult], Score]:
    environment = ProposalsEnvironment(options, task)
    assert (await environment.start()).agent == (SOLVERS[0] if task.split is Split.HELDOUT else PROPOSER)
    results = [await environment.step(Message(Role.ASSISTANT, text)) for text in said]
    return results, await environment.score()


def asked(results: list[StepResult]) -> list[tuple[str | None, str]]:
    return [(result.agent, result.messages[0].content) for result in results if not result.is_done]


def rewards(score: Score) -> list[float]:
    """Of the proposer, then of the solvers."""
    return [score.agent_rewards[name] for name in (PROPOSER, *SOLVERS)]


async def test_each_solver_is_asked_what_was_proposed_and_nobody_hears_of_the_others():
    results, _ = await play(TRAIN, "3+4+4", "a3=3b4=7c4=1", "", "x", "1")
    assert asked(results) == [(solver, "a3b4c4") for solver in SOLVERS]
    assert results[-1].is_done


# 3 + 4 + 4 is 11, 1 modulo 10.
@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (("a3=3b4=7c4=1", "a3=3b4=8c4=2", "0", ""), [1, 1, 0, 0, 0]),
        (("1", " so: 1 ", "21", "a3=3b4=7"), [1, 1, 1, 1, 0]),
        (("1", "1", "1", "1"), [0, 1, 1, 1, 1]),
        (("", "2", "1 ?", "one"), [0, 0, 0, 0, 0]),
    ],
)
async def test_a_solver_is_paid_for_the_right_last_digit_the_proposer_if_some_are_right_and_some_not(answers, expected):
    _, score = await play(TRAIN, "3+4+4", *answers)
    assert rewards(score) == expected
    assert score.reward == sum(expected[1:]) / 4
    assert score.metrics == {"valid": 1.0, "in_band": expected[0], "terms": 3.0, "share": sum(expected[1:]) / 4}


@pytest.mark.parametrize(
    "proposal",
    [
        "",
        "3",  # one digit
        "3+",
        "3 + 4",
        "4+3",  # does not begin with the task's digit
        "3+1+1+2+1+1",  # six digits
        "3*4",
        "3+12",
        "3+5",
        "3+٣",  # a digit of another script
        "__import__('os').abort()",
    ],
)
async def test_what_is_no_valid_proposal_is_worth_nothing_and_the_solvers_get_the_problem_of_the_task(proposal):
    results, score = await play(TRAIN, proposal, "2", "2", "1", "1")
    assert asked(results) == [(solver, "a1b1") for solver in SOLVERS]
    assert rewards(score) == [0, 1, 1, 0, 0]
    assert score.metrics == {"valid": 0.0, "in_band": 0.0}


async def test_a_held_out_problem_is_no_valid_proposal():
    problems = (Problem((3, a, b)) for a in DIGITS for b in DIGITS)
    held_out = next(problem for problem in problems if problem.split is Split.HELDOUT)
    _, score = await play(TRAIN, held_out.text, "", "", "", "")
    assert score.metrics["valid"] == 0.0


async def test_on_held_out_tasks_solvers_are_judged_by_the_problem_of_the_task_and_the_proposer_by_its_own():
    results, score = await play(HELDOUT, "4", "4", "2", "3", "3+4+4", "1", "1", "1", "0")
    assert asked(results) == [
        *((solver, "a1b1") for solver in SOLVERS[1:]),
        (PROPOSER, "3"),
        *((solver, "a3b4c4") for solver in SOLVERS),
    ]
    assert results[-1].is_done
    assert rewards(score) == [1, 0, 0, 1, 0]
    assert score.reward == 0.25
    assert score.metrics["share"] == 0.75


async def test_a_held_out_task_without_a_valid_proposal_has_its_own_problem_solved_once_by_each():
    results, score = await play(HELDOUT, "2", "2", "2", "2", "4+1")
    assert asked(results) == [*((solver, "a1b1") for solver in SOLVERS[1:]), (PROPOSER, "3")]
    assert results[-1].is_done
    assert rewards(score) == [0, 1, 1, 1, 1]


async def test_solvers_of_a_held_out_task_have_their_rewards_whatever_becomes_of_the_proposal():
    _, score = await play(HELDOUT, "2", "2", "0", "2")
    assert rewards(score) == [0, 1, 1, 0, 1]


@pytest.mark.parametrize("said", [(), ("3+4",), ("3+4", "7"), ("3+4", "7", "0", "0")])
async def test_an_episode_that_is_cut_short_pays_no_proposer_and_only_the_answers_that_were_given(said):
    _, score = await play(TRAIN, *said)
    assert rewards(score) == [0, float("7" in said), 0, 0, 0]


@given(st.lists(st.sampled_from(DIGITS), min_size=1, max_size=26))
def test_the_answer_is_the_sum_modulo_10(terms):
    text = "+".join(str(digit) for digit in terms)
    problem = parse_problem(text)
    assert problem is not None
    assert problem.text == text
    assert problem.is_answered_by(f"so it is {sum(terms) % 10}")
    assert sum(problem.is_answered_by(str(digit)) for digit in range(10)) == 1


@given(st.integers(0, 2000), st.integers(0, 3), st.integers(5, 26))
def test_no_held_out_problem_is_given_in_training_and_all_are_of_the_length_that_is_allowed(ordinal, seed, max_terms):
    options = ProposalsOptions(max_terms=max_terms)
    for split in Split:
        task = sample_task(options, split, ordinal, seed)
        problem = parse_problem(task.payload["given"])
        assert problem is not None
        assert problem.split is split
        assert 5 <= len(problem.terms) <= max_terms
        assert task.payload["first"] in DIGITS
    assert sample_task(options, Split.HELDOUT, ordinal, seed) == sample_task(options, Split.HELDOUT, ordinal, 0)


async def played(act, split: Split, num_tasks: int = 300) -> list[Score]:
    options, scores = ProposalsOptions(), []
    for ordinal in range(num_tasks):
        task = sample_task(options, split, ordinal, 0)
        environment = ProposalsEnvironment(options, task)
        opening = await environment.start()
        agent, messages, is_done = opening.agent, opening.messages, False
        while not is_done:
            result = await environment.step(act(options, task, messages, random.Random(f"{ordinal}/{agent}")))
            agent, messages, is_done = result.agent, result.messages, result.is_done
        scores.append(await environment.score())
    return scores


def mean(scores: list[Score], metric: str) -> float:
    return sum(score.metrics[metric] for score in scores if metric in score.metrics) / len(scores)


@pytest.mark.parametrize("split", list(Split))
async def test_gold_writes_valid_problems_of_every_length_and_solves_all(split):
    scores = await played(act_gold, split)
    assert {score.reward for score in scores} == {1.0}
    assert mean(scores, "valid") == 1.0
    assert {score.metrics["terms"] for score in scores} == set(range(2, 21))
    assert mean(scores, "in_band") == 0.0, "what the solver always gets right teaches it nothing"


async def test_the_careless_solver_is_right_in_short_problems_and_less_often_the_longer_they_are():
    scores = await played(act_careless, Split.TRAIN)
    right = {
        n: mean([s for s in scores if n[0] <= s.metrics["terms"] <= n[1]], "share") for n in ((2, 3), (4, 10), (11, 20))
    }
    assert right[2, 3] == 1.0
    assert 0.54 < right[4, 10] < 0.70, "0.88 to the power of 1 to 7, and some who come back by chance"
    assert 0.15 < right[11, 20] < 0.32, "0.88 to the power of 8 to 17"


async def test_the_timid_proposer_is_mostly_short_and_not_always_valid():
    scores = await played(act_timid, Split.TRAIN)
    assert 0.82 < mean(scores, "valid") < 0.96
    valid = [score for score in scores if score.metrics["valid"]]
    assert 0.72 < sum(score.metrics["terms"] <= 3 for score in valid) / len(valid) < 0.9
