from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.types.message import Message, Role
from agentrl.types.task import Split, Task
from agentrl_environments.nim.environment import FIRST, SECOND, NimEnvironment, parse_move
from agentrl_environments.nim.experts import act_beginner, act_gold
from agentrl_environments.nim.tasks import NimOptions, balance, sample_task, split_of_start

GAME = Task("nim", Split.TRAIN, 0, {"piles": [3, 5]})


async def played(*moves: str) -> tuple[NimEnvironment, list[tuple[str | None, str]]]:
    """A game after these moves, and what was shown to whom."""
    environment = NimEnvironment(NimOptions(), GAME)
    opening = await environment.start()
    shown = [(opening.agent, opening.messages[0].content)]
    for move in moves:
        result = await environment.step(Message(Role.ASSISTANT, move))
        shown += [(result.agent, message.content) for message in result.messages]
        assert result.is_done == (not result.messages)
    return environment, shown


async def test_agents_move_in_turn_and_who_takes_the_last_object_wins():
    environment, shown = await played("b 2", " a 3\n", "b 3")
    assert shown == [(FIRST, "a 3 b 5"), (SECOND, "a 3 b 3"), (FIRST, "a 0 b 3")]
    score = await environment.score()
    assert (score.reward, score.agent_rewards) == (1.0, {FIRST: 1.0, SECOND: 0.0})
    assert score.metrics == {"moves": 3.0, "fouls": 0.0}


@pytest.mark.parametrize("foul", ["", "b", "b 6", "b 0", "c 1", "b 2 now", "b -1", "b ²", "take b 2", "b  2"])
async def test_a_move_that_is_not_allowed_loses_whoever_makes_it(foul):
    first, _ = await played(foul)
    second, _ = await played("a 1", foul)
    assert (await first.score()).agent_rewards == {FIRST: 0.0, SECOND: 1.0}
    assert (await second.score()).agent_rewards == {FIRST: 1.0, SECOND: 0.0}
    assert (await first.score()).metrics["fouls"] == 1.0


async def test_nobody_has_won_a_game_that_is_not_over():
    environment, _ = await played("b 2")
    assert (await environment.score()).agent_rewards == {FIRST: 0.0, SECOND: 0.0}


@cache
def can_win(piles: tuple[int, ...]) -> bool:
    """Whether the mover wins, by trying all moves."""
    after = (
        (*piles[:place], piles[place] - taken, *piles[place + 1 :])
        for place in range(len(piles))
        for taken in range(1, piles[place] + 1)
    )
    return any(not can_win(rest) for rest in after)


@given(st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any))
def test_right_play_leaves_a_lost_position_wherever_there_is_one(piles):
    assert (balance(piles) != 0) == can_win(tuple(piles))
    if not can_win(tuple(piles)):
        return
    shown = dict(zip("abc", piles, strict=True))
    said = Message(Role.USER, " ".join(f"{pile} {number}" for pile, number in shown.items()))
    move = parse_move(act_gold(NimOptions(num_piles=3), GAME, [said], random.Random(0)).content, shown)
    assert move is not None
    shown[move[0]] -= move[1]
    assert not can_win(tuple(shown.values()))


async def wins_of_first(first, second, num_games: int = 200) -> float:
    options, won = NimOptions(), 0.0
    for ordinal in range(num_games):
        task = sample_task(options, Split.HELDOUT, ordinal, 0)
        environment = NimEnvironment(options, task)
        result = await environment.start()
        agent, is_done, number = result.agent, False, 0
        while not is_done:
            act = first if agent == FIRST else second
            number += 1
            step = await environment.step(act(options, task, result.messages, random.Random(f"{ordinal}/{number}")))
            result, agent, is_done = step, step.agent, step.is_done
        won += (await environment.score()).reward
    return won / num_games


async def test_right_play_wins_every_held_out_game_and_a_beginner_against_it_hardly_any():
    assert await wins_of_first(act_gold, act_gold) == 1.0
    assert await wins_of_first(act_gold, act_beginner) == 1.0
    assert await wins_of_first(act_beginner, act_gold) < 0.3
    assert 0.3 < await wins_of_first(act_beginner, act_beginner) < 0.7


@given(st.integers(0, 300), st.integers(0, 3), st.integers(2, 3), st.integers(3, 9))
def test_no_held_out_start_is_a_training_start_in_whatever_order_and_all_can_be_won(
    ordinal, seed, num_piles, max_objects
):
    options = NimOptions(num_piles=num_piles, max_objects=max_objects)
    held = sample_task(options, Split.HELDOUT, ordinal, seed)
    assert held == sample_task(options, Split.HELDOUT, ordinal, seed + 1)
    assert balance(held.payload["piles"])
    trained = {tuple(sorted(sample_task(options, Split.TRAIN, n, seed).payload["piles"])) for n in range(60)}
    assert tuple(sorted(held.payload["piles"])) not in trained
    assert split_of_start(held.payload["piles"][::-1]) is Split.HELDOUT
