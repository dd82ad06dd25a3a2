"""Scripted players of the workflow environment: a ceiling, a teacher with bad habits, and a floor."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentrl.envs.authoring import call, say
from agentrl.envs.definition import Expert
from agentrl.types.message import Message, Role
from agentrl.types.task import Task
from agentrl_environments.workflow.tasks import PAPER_LETTERS, WorkflowOptions, build_records
from agentrl_environments.workflow.world import GRADES, HANDLINGS, TARIFFS, Records

CLUMSY_HABITS = {"clean": 0.10, "grade": 0.30, "tariff": 0.30, "handling": 0.30}
"""How often the clumsy expert does what: all rightly, or with the first grade, tariff or handling that there is instead
of the one on file. A first one is right one time in three."""


def act_clean(options: WorkflowOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """Look everything up, choose by it, take every step once: always right."""
    return _next(options, task, messages, "clean")


def act_clumsy(options: WorkflowOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """Right steps and one careless choice: right about 40 times in 100 with one order."""
    habit = rng.choices(list(CLUMSY_HABITS), list(CLUMSY_HABITS.values()))[0]
    return _next(options, task, messages, habit)


def act_random(options: WorkflowOptions, task: Task, messages: Sequence[Message], rng: random.Random) -> Message:
    """Calls drawn without reading anything."""
    turn = sum(message.role is Role.ASSISTANT for message in messages)
    rng.seed(f"{rng.random()}-{turn}")
    code = f"{rng.choice(['o', *PAPER_LETTERS.values()])}{rng.randint(10, 99)}"
    calls = (
        call("read_order", order_id=code),
        call("collect_payment", invoice=code),
        call("release_goods", receipt=code),
        call("dispatch", shipment=code),
        say("done"),
    )
    return rng.choice(calls)


EXPERTS = {
    "expert": Expert("always right: looks everything up, then acts", act_clean),
    "clumsy": Expert("right steps, one careless choice; right about 40 in 100", act_clumsy),
    "random": Expert("random calls; never right", act_random),
}


def plan(records: Records, habit: str = "clean") -> list[Message]:
    """All calls that a player of that habit makes, in order."""
    return [step for order_id in records.asked for step in _plan_of(records, order_id, habit)]


def _plan_of(records: Records, order_id: str, habit: str) -> list[Message]:
    order = records.orders[order_id]
    customer, item = records.customers[order.customer], records.items[order.item]
    grade = GRADES[0] if habit == "grade" else order.grade
    tariff = TARIFFS[0] if habit == "tariff" else customer.tariff
    handling = HANDLINGS[0] if habit == "handling" else item.handling
    reservation, invoice, receipt, parcel, shipment, slip = order.papers
    return [
        call("read_order", order_id=order_id),
        call("find_stock", item=order.item, grade=grade),
        call("reserve", order_id=order_id, warehouse=item.warehouses[grade]),
        call("read_customer", customer=order.customer),
        call("issue_invoice", reservation=reservation, tariff=tariff),
        call("collect_payment", invoice=invoice),
        call("release_goods", receipt=receipt),
        call("find_carrier", town=customer.town, handling=handling),
        call("book_carrier", parcel=parcel, carrier=records.carriers[customer.town][handling]),
        call("dispatch", shipment=shipment),
        call("close_order", order_id=order_id, slip=slip),
    ]


def _next(options: WorkflowOptions, task: Task, messages: Sequence[Message], habit: str) -> Message:
    steps = plan(build_records(options, task.payload["seed"], task.split), habit)
    turn = sum(message.role is Role.ASSISTANT for message in messages)
    return steps[turn] if turn < len(steps) else say("done")
