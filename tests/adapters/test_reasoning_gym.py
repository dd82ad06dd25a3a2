"""Questions of the real reasoning-gym, its judges, and what they must not be given."""

from __future__ import annotations

import ast
import re

import pytest

from agentrl.types.errors import ConfigError, EpisodeError
from agentrl.types.task import Split
from agentrl_environments.reasoning_gym.answers import ARITHMETIC, FORMULAS, LISTS
from tests.adapters.packaged import checked, hosted, played

pytestmark = pytest.mark.usefixtures("beside_packages")
SUMS = {"chain_sum": {"arguments": {"min_terms": 2, "max_terms": 4}}}


async def test_the_judge_finds_what_is_computed_by_hand(tmp_path):
    async with hosted("reasoning_gym", tmp_path, generators=SUMS) as host:
        for task in await host.sample(Split.TRAIN, 0, range(5)):
            question = (await played(host, task, []))[0][0]
            terms = re.findall(r"[+-]? ?\d+", question.partition(":")[2].partition("=")[0])
            result = sum(int(term.replace(" ", "")) for term in terms)
            for reply, reward in ((f"So <answer>{result}</answer>", 1.0), (f"{result}", 1.0), (f"{result + 1}", 0.0)):
                _, is_done, score = await played(host, task, [reply])
                assert (is_done, score.reward) == (True, reward), (question, reply)
                assert score.metrics["tagged"] == ("<answer>" in reply)


async def test_a_mix_has_its_weights_and_no_question_is_of_both_splits(tmp_path):
    mix = {"chain_sum": {"weight": 3.0, "arguments": {"max_digits": 1, "max_terms": 2}}, "gcd": {}}
    async with hosted("reasoning_gym", tmp_path, generators=mix) as host:
        asked = {split: await host.sample(split, 0, range(100)) for split in Split}
        assert await host.sample(Split.HELDOUT, 5, range(100)) == asked[Split.HELDOUT]
        assert await host.sample(Split.TRAIN, 5, range(100)) != asked[Split.TRAIN]
    sums = sum(task.payload["generator"] == "chain_sum" for task in asked[Split.TRAIN])
    assert 60 <= sums <= 90
    questions = {s: {ast.literal_eval(task.payload["entry"])["question"] for task in asked[s]} for s in Split}
    assert not questions[Split.TRAIN] & questions[Split.HELDOUT]


async def test_judges_that_evaluate_are_given_answers_and_no_programs(tmp_path):
    mark = tmp_path / "mark"
    programs = [f"open('{mark}', 'w')", f"[open('{mark}', 'w')]", f"S(\"open('{mark}', 'w')\")", "9**9**9**9"]
    evaluating = sorted(LISTS | ARITHMETIC | FORMULAS)
    async with hosted("reasoning_gym", tmp_path, generators={name: {} for name in evaluating}) as host:
        tasks = {task.payload["generator"]: task for task in await host.sample(Split.TRAIN, 0, range(40))}
        assert sorted(tasks) == evaluating
        for name, task in tasks.items():
            gold = str(ast.literal_eval(task.payload["entry"])["answer"])
            assert (await played(host, task, [f"<answer>{gold}</answer>"]))[2].reward == 1.0, (name, gold)
            for program in programs:
                score = (await played(host, task, [f"<answer>{program}</answer>"]))[2]
                assert (score.reward, score.metrics["refused"]) == (0.0, 1.0), (name, program)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("generators", "message"),
    [
        ({"chain_sums": {}}, "reasoning-gym has no generator 'chain_sums'; it has .*chain_sum, "),
        ({"chain_sum": {"arguments": {"terms": 2}}}, "the arguments of chain_sum are wrong: .*terms"),
        ({"chain_sum": {"arguments": {"min_terms": -2}}}, "the arguments of chain_sum are wrong: min_terms"),
    ],
)
async def test_a_generator_that_is_not_there_is_named_before_a_run_begins(tmp_path, generators, message):
    with pytest.raises((ConfigError, EpisodeError), match=message):
        async with hosted("reasoning_gym", tmp_path, generators=generators):
            pass


def test_the_environment_keeps_what_it_must():
    said = checked("agentrl_environments.reasoning_gym:definition", "--tasks", "4")
    assert re.search(r"gold 1\.00", said), said
