"""What a task asks for, what is refused, and what a wrong choice leads to."""

from __future__ import annotations

import pytest

from agentrl.envs.authoring import call, say
from agentrl.envs.definition import load_environment
from agentrl.types.environment import Recovery
from agentrl.types.message import Message
from agentrl.types.task import Split
from agentrl_environments.workflow import definition
from agentrl_environments.workflow.experts import plan
from agentrl_environments.workflow.tasks import WorkflowOptions, build_records, sample_task
from agentrl_environments.workflow.world import Records
from tests.expert_play import mean_reward
from tests.unit.workflow.workflow_play import ACTING, choices, judged, opened, records_of

OPTIONS = WorkflowOptions()
TWO = WorkflowOptions(num_orders=2)
WRONG = {"warehouse": "returned: wrong grade", "tariff": "returned: wrong tariff", "carrier": "returned: wrong carrier"}


def records(split: Split, ordinal: int, seed: int = 0) -> Records:
    return build_records(TWO, sample_task(TWO, split, ordinal, seed).payload["seed"], split)


def with_wrong(known: Records, choice: str) -> list[Message]:
    """The expert's calls with one wrong choice for the first order."""
    steps = plan(known)
    place = next(n for n, step in enumerate(steps) if choice in step.tool_calls[0].arguments)
    tool = steps[place].tool_calls[0].name
    wrong = [c for c in choices(known, known.asked[0]) if c.tool_calls[0].name == tool and c != steps[place]]
    return [*steps[:place], wrong[-1], *steps[place + 1 :]]


@pytest.mark.parametrize("options", [OPTIONS, TWO], ids=["one order", "two orders"])
@pytest.mark.parametrize("split", list(Split))
async def test_the_expert_is_always_right(split, options):
    assert await mean_reward(definition, options, "expert", 60, split) == 1.0


async def test_the_clumsy_expert_is_right_about_40_times_in_100_and_chance_never():
    assert 0.33 < await mean_reward(definition, OPTIONS, "clumsy", 400) < 0.47
    assert await mean_reward(definition, OPTIONS, "random", 100) == 0.0


async def test_nothing_said_and_nothing_done_scores_nothing():
    for actions in ([], [say("")], [say("done")]):
        assert (await judged(opened(OPTIONS), actions))[1].reward == 0.0


@pytest.mark.parametrize("ordinal", range(5))
async def test_ten_calls_of_a_task_need_one_another(ordinal):
    """By the texts alone: a call needs those whose answers have a name or code that it passes on."""
    environment = opened(OPTIONS, ordinal)
    steps, depths, heard = plan(records_of(environment)), [], []
    for step in steps:
        values = [
            value for value in step.tool_calls[0].arguments.values() if value not in records_of(environment).asked
        ]
        needed = [max(n for n, said in enumerate(heard) if value in said) for value in values]
        depths.append(1 + max((depths[n] for n in needed), default=0))
        heard += [message.content for message in (await environment.step(step)).messages]
    assert len(steps) == 11
    assert depths[-1] == max(depths) == 10


@pytest.mark.parametrize("left_out", ACTING)
async def test_a_step_that_is_left_out_has_all_later_ones_refused(left_out):
    environment = opened(OPTIONS)
    steps = [step.tool_calls[0].name for step in plan(records_of(environment))]
    rest = [step for step in plan(records_of(environment)) if step.tool_calls[0].name != left_out]
    said, score = await judged(environment, rest)
    later = [text for name, text in zip([s for s in steps if s != left_out], said, strict=True) if name in ACTING]
    refused = [text.startswith("error: no ") for text in later]
    place = ACTING.index(left_out)
    assert refused == [False] * place + [True] * (len(ACTING) - 1 - place)
    assert score.reward == 0.0
    assert score.metrics["refused_calls"] == len(ACTING) - 1 - place


@pytest.mark.parametrize("choice", list(WRONG))
async def test_a_wrong_choice_is_taken_as_it_is_and_shows_when_the_order_is_closed(choice):
    environment = opened(OPTIONS)
    said, score = await judged(environment, with_wrong(records_of(environment), choice))
    assert not any(text.startswith("error") for text in said)
    assert said[-1] == WRONG[choice]
    assert score.reward == 0.0
    assert score.metrics == {"closed_orders": 1.0, "refused_calls": 0.0, "spoilt": 1.0}


@pytest.mark.parametrize("habit", ["grade", "tariff", "handling"])
async def test_a_careless_player_hears_nothing_of_it_and_is_right_where_the_first_is_the_right_one(habit):
    said_last = set()
    for ordinal in range(20):
        environment = opened(OPTIONS, ordinal)
        known = records_of(environment)
        said, score = await judged(environment, plan(known, habit))
        assert not any(text.startswith("error") for text in said)
        assert score.reward == float(plan(known, habit) == plan(known))
        said_last.add(said[-1])
    assert said_last == {"delivered", f"returned: wrong {'carrier' if habit == 'handling' else habit}"}


async def test_all_wrong_choices_are_told():
    environment = opened(OPTIONS)
    known = records_of(environment)
    right = plan(known)
    of_order = choices(known, known.asked[0])
    wrong = [
        next((c for c in of_order if c.tool_calls[0].name == s.tool_calls[0].name and c not in right), s) for s in right
    ]
    said, _ = await judged(environment, wrong)
    assert said[-1] == "returned: wrong grade, tariff, carrier"


async def test_a_carrier_of_another_town_is_wrong_and_one_that_nobody_knows_is_refused():
    environment = opened(OPTIONS)
    known = records_of(environment)
    steps = plan(known)
    home = known.customers[known.orders[known.asked[0]].customer].town
    away = next(name for town, names in known.carriers.items() if town != home for name in names.values())
    book = next(n for n, step in enumerate(steps) if step.tool_calls[0].name == "book_carrier")
    parcel = steps[book].tool_calls[0].arguments["parcel"]
    attempts = [call("book_carrier", parcel=parcel, carrier=name) for name in ("no body", away)]
    said, _ = await judged(environment, [*steps[:book], *attempts, *steps[book + 1 :]])
    assert said[book] == "error: no carrier 'no body'"
    assert said[-1] == "returned: wrong carrier"


async def test_whoever_touches_the_order_of_another_has_failed_though_all_is_delivered():
    environment = opened(OPTIONS)
    known = records_of(environment)
    other = next(order for order in known.orders if order not in known.asked)
    touched = call("reserve", order_id=other, warehouse=known.items[known.orders[other].item].warehouses["red"])
    said, score = await judged(environment, [touched, *plan(known)])
    assert said[-1] == "delivered"
    assert score.reward == 0.0


async def test_what_cannot_be_done_is_refused_and_changes_nothing():
    environment = opened(TWO)
    known = records_of(environment)
    first, second = known.asked
    steps = plan(known)
    order = known.orders[first]
    town = known.customers[order.customer].town
    before = await environment.snapshot()
    refused = {
        "error: no order 'o1'": call("read_order", order_id="o1"),
        "error: no customer 'no body'": call("read_customer", customer="no body"),
        "error: no item 'gold'": call("find_stock", item="gold", grade="red"),
        "error: no grade 'big'; there are red, blue, green": call("find_stock", item=order.item, grade="big"),
        "error: no town 'paris'": call("find_carrier", town="paris", handling="dry"),
        "error: no handling 'hot'; there are cold, dry, frail": call("find_carrier", town=town, handling="hot"),
        f"error: no {order.item} in warehouse 'shed'": call("reserve", order_id=first, warehouse="shed"),
        f"error: no reservation '{order.papers[0]}'": call(
            "issue_invoice", reservation=order.papers[0], tariff="basic"
        ),
        f"error: no slip '{order.papers[5]}'": call("close_order", order_id=first, slip=order.papers[5]),
    }
    said, score = await judged(environment, refused.values())
    assert said == list(refused)
    assert score.metrics["refused_calls"] == len(refused)
    assert environment.save()["world"] == opened(TWO).save()["world"]
    assert before == await opened(TWO).snapshot()
    said, _ = await judged(environment, [*steps[:3], steps[2], steps[4], steps[4]])
    assert said[3] == f"error: order {first} is reserved already"
    assert said[5] == f"error: reservation {order.papers[0]} was used already"
    tariff = call("issue_invoice", reservation=order.papers[0], tariff="cheap")
    assert (await judged(environment, [tariff]))[0] == ["error: no tariff 'cheap'; there are basic, trade, special"]
    await judged(environment, steps[5:10])
    swapped = call("close_order", order_id=second, slip=order.papers[5])
    assert (await judged(environment, [swapped]))[0] == [f"error: slip {order.papers[5]} is of another order"]
    _, score = await judged(environment, steps[10:])
    assert score.reward == 1.0


def test_records_are_the_same_for_equal_seeds_and_held_out_ones_whatever_the_seed():
    assert records(Split.TRAIN, 0) != records(Split.TRAIN, 0, seed=1)
    assert records(Split.HELDOUT, 0) == records(Split.HELDOUT, 0, seed=1)
    before = records(Split.TRAIN, 0)
    build_records.cache_clear()
    assert records(Split.TRAIN, 0) == before


def test_the_splits_share_no_name():
    def names(split: Split) -> set[str]:
        found: set[str] = set()
        for known in (records(split, n) for n in range(100)):
            of_towns = {name for names in known.carriers.values() for name in names.values()}
            of_items = {name for item in known.items.values() for name in item.warehouses.values()}
            found |= {*known.customers, *known.items, *known.carriers, *of_towns, *of_items}
        return found

    assert names(Split.TRAIN) & names(Split.HELDOUT) == set()


def test_codes_are_of_one_order_each_and_no_two_choices_are_the_same():
    for ordinal in range(100):
        known = records(Split.TRAIN, ordinal)
        codes = [code for order in known.orders.values() for code in order.papers]
        assert len(set(codes)) == len(codes) == 6 * len(known.orders)
        for order in known.orders.values():
            item, customer = known.items[order.item], known.customers[order.customer]
            assert len(set(item.warehouses.values())) == 3
            assert len(set(known.carriers[customer.town].values())) == 3


def test_its_states_can_be_had_again_for_forks_and_for_lost_workers():
    assert load_environment("workflow").recovery == Recovery(has_snapshots=True, is_deterministic=True)
