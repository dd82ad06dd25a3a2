"""States: a restored one goes on as the live one does, and the turn that spoils a task is the one that is named."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.envs.authoring import say
from agentrl.envs.definition import load_environment
from agentrl.types.environment import Origin
from agentrl.types.message import Message
from agentrl.types.task import Split
from agentrl_environments.workflow.environment import WorkflowEnvironment
from agentrl_environments.workflow.experts import plan
from agentrl_environments.workflow.tasks import WorkflowOptions
from tests.unit.workflow.workflow_play import everything, judged, opened, play, records_of

ORDINALS = st.integers(0, 20)
NUM_ORDERS = st.integers(1, 2)
# A place in the plan, one step after the other, or else anything at all: chance alone would hardly get past the start.
MOVES = st.lists(st.one_of(st.just(None), st.just(None), st.integers(0, 10_000)), max_size=30)


def actions_of(environment: WorkflowEnvironment, moves: list[int | None], begun: int = 0) -> list[Message]:
    """The next call of the expert's for each None, any call for a number, and now and then a word that ends it all."""
    known = records_of(environment)
    expert, pool = plan(known), everything(known)
    actions = []
    for move in moves:
        if move is None:
            actions.append(expert[begun % len(expert)])
            begun += 1
        else:
            actions.append(say("done") if move % 97 == 0 else pool[move % len(pool)])
    return actions


@given(ORDINALS, NUM_ORDERS, st.sampled_from(list(Split)), MOVES, MOVES)
@settings(max_examples=60)
def test_a_restored_instance_goes_on_as_the_live_one_whatever_is_done(ordinal, num_orders, split, before, after):
    async def check() -> None:
        definition = load_environment("workflow")
        options = WorkflowOptions(num_orders=num_orders)
        live = opened(options, ordinal, split)
        await play(live, actions_of(live, before))
        snapshot = await live.snapshot()
        following = actions_of(live, after, begun=before.count(None))
        live_results = [await live.step(action) for action in following]
        restored = await definition.make(options, live.task, Origin(snapshot=snapshot))
        assert await restored.snapshot() == snapshot
        assert [await restored.step(action) for action in following] == live_results
        assert await restored.score() == await live.score()
        assert await restored.snapshot() == await live.snapshot()

    asyncio.run(check())


@given(ORDINALS, NUM_ORDERS, MOVES)
@settings(max_examples=60)
def test_a_task_can_still_succeed_exactly_until_the_turn_that_spoilt_it(ordinal, num_orders, moves):
    async def check() -> None:
        options = WorkflowOptions(num_orders=num_orders)
        whole = opened(options, ordinal)
        actions = actions_of(whole, moves)
        results = await play(whole, actions)
        spoilt = (await whole.score()).metrics["spoilt"] == 1.0
        spoilt_turn = whole.save()["spoilt_turn"]
        assert spoilt == (spoilt_turn is not None)
        for num_played in {len(results), *([spoilt_turn, spoilt_turn + 1] if spoilt else [])}:
            again = opened(options, ordinal)
            played = await play(again, actions[:num_played])
            if not (played and played[-1].is_done):
                await play(again, plan(records_of(again)))
            can_succeed = not spoilt or num_played <= spoilt_turn
            assert (await again.score()).reward == float(can_succeed)

    asyncio.run(check())


@given(ORDINALS, MOVES)
@settings(max_examples=60)
def test_turn_rewards_change_no_reward_and_blame_the_turn_that_spoilt_the_task(ordinal, moves):
    async def check() -> None:
        environment = opened(WorkflowOptions(turn_rewards=True), ordinal)
        results = await play(environment, actions_of(environment, moves))
        score, turn = await environment.score(), environment.save()["spoilt_turn"]
        assert sum(score.turn_rewards.values()) == 0.0
        # What is still to come, outcome included, from each turn on.
        to_come = [
            score.reward + sum(reward for at, reward in score.turn_rewards.items() if at >= place)
            for place in range(len(results))
        ]
        if turn is not None:
            assert to_come == [0.0] * (turn + 1) + [1.0] * (len(results) - turn - 1)
        else:
            assert to_come == [score.reward] * len(results)
        plain = opened(WorkflowOptions(), ordinal)
        await play(plain, actions_of(plain, moves))
        assert await plain.score() == replace(score, turn_rewards={})

    asyncio.run(check())


async def test_a_snapshot_of_the_middle_is_enough_to_deliver_elsewhere_and_holds_no_later_steps():
    live = opened(WorkflowOptions(), 7)
    steps = plan(records_of(live))
    await play(live, steps[:6])
    snapshot = await live.snapshot()
    await play(live, steps[6:])
    elsewhere = opened(WorkflowOptions(), 7)
    elsewhere.restore(snapshot)
    assert (await elsewhere.score()).metrics["closed_orders"] == 0.0
    said, score = await judged(elsewhere, steps[6:])
    assert said[-1] == "delivered"
    assert score.reward == (await live.score()).reward == 1.0
