from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.config.base import parse_config
from agentrl.scorers.config import find_definition
from agentrl.scorers.definition import ScorerSetting
from agentrl.scorers.turn_function import TurnFunction, TurnFunctionConfig, build_turn_function
from agentrl.types.errors import Boundary, ConfigError
from agentrl.types.turn_score import ScoredTurn, TurnKey, TurnScore, check_turn_score, token_digest

OWN = "tests.unit.scorers.own_functions"


def turn_of(prompt: int, reply: int, number: int = 0) -> ScoredTurn:
    ids = np.arange(prompt + reply, dtype=np.int32)
    return ScoredTurn(TurnKey("sql-000000-0", "agent", number, token_digest(ids)), "main", ids, prompt)


async def build(function: str) -> TurnFunction:
    table = {"kind": "turn_function", "name": "mine", "function": function}
    return await build_turn_function(parse_config(TurnFunctionConfig, table, "scorer"), ScorerSetting({}))


async def scores_of(name: str, *turns: ScoredTurn) -> list[TurnScore]:
    scores = await (await build(f"{OWN}:{name}")).score(turns)
    return [check_turn_score(*pair) for pair in zip(turns, scores, strict=True)]


async def test_a_number_is_the_value_of_the_state_that_the_reply_leads_to():
    scores = await scores_of("reply_share", turn_of(3, 1), turn_of(1, 3, 1))
    assert [(score.value, score.prior) for score in scores] == [(0.25, None), (0.75, None)]
    assert [score.key.turn for score in scores] == [0, 1]


async def test_a_number_of_numpy_is_a_number():
    (score,) = await scores_of("numpy_share", turn_of(3, 1))
    assert type(score.value) is float
    assert score.value == 0.25


async def test_a_score_of_its_own_stays_as_it_is():
    (score,) = await scores_of("both", turn_of(3, 1))
    assert (score.version, score.value, score.prior, score.note) == ("mine:7", 0.5, 0.25, "half")


async def test_coroutines_of_a_batch_run_at_once():
    scores = await scores_of("three_at_once", *(turn_of(3, 1, number) for number in range(3)))
    assert [score.value for score in scores] == [1.0, 1.0, 1.0]


async def test_a_turn_at_which_it_raises_has_the_failure_and_the_others_their_scores():
    short, long = await scores_of("fails_at_short_ones", turn_of(3, 1), turn_of(3, 4, 1))
    assert (short.value, long.value) == (None, 1.0)
    assert short.failure is not None
    assert (short.failure.boundary, short.failure.kind) == (Boundary.SCORER, "function")
    assert "KeyError: 'too short'" in short.failure.message
    assert "in fails_at_short_ones" in short.failure.message


@pytest.mark.parametrize(("name", "said"), [("says_yes", "True"), ("says_nothing", "None")])
async def test_what_is_no_number_is_a_failure_and_never_zero(name: str, said: str):
    (score,) = await scores_of(name, turn_of(3, 1))
    assert score.value is None
    assert score.failure is not None
    assert f"the function gave {said}, not a number" in score.failure.message


async def test_a_function_whose_file_is_edited_makes_scores_of_another_version(tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    versions: list[Any] = []
    for number in (1, 1, 2):
        (tmp_path / "edited_scorer.py").write_text(f"def f(turn):\n    return {number}\n")
        monkeypatch.delitem(sys.modules, "edited_scorer", raising=False)
        (score,) = await (await build("edited_scorer:f")).score([turn_of(3, 1)])
        versions.append(score.version)
    assert versions[0] == versions[1] != versions[2]
    assert versions[0].startswith("edited_scorer:f:")


@pytest.mark.parametrize("name", ["NUMBER", "ScoredTurn"])
async def test_what_is_no_function_is_named(name: str):
    with pytest.raises(ConfigError, match=f"scorer 'mine': {OWN}:{name} is a .*, not a function; name one that takes"):
        await build(f"{OWN}:{name}")


def test_functions_compute_in_processes_of_their_own():
    assert find_definition("turn_function").computes
