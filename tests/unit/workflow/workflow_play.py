"""Plays the workflow environment step by step, for its tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from agentrl.envs.authoring import call
from agentrl.types.environment import Score, StepResult
from agentrl.types.message import Message
from agentrl.types.task import Split
from agentrl_environments.workflow.environment import WorkflowEnvironment
from agentrl_environments.workflow.experts import plan
from agentrl_environments.workflow.tasks import WorkflowOptions, build_records, sample_task
from agentrl_environments.workflow.world import TARIFFS, Records

ACTING = "reserve issue_invoice collect_payment release_goods book_carrier dispatch close_order".split()


def opened(options: WorkflowOptions, ordinal: int = 3, split: Split = Split.TRAIN) -> WorkflowEnvironment:
    return WorkflowEnvironment(options, sample_task(options, split, ordinal, 0))


def records_of(environment: WorkflowEnvironment) -> Records:
    return build_records(environment.options, environment.task.payload["seed"], environment.task.split)


async def play(environment: WorkflowEnvironment, actions: Iterable[Message]) -> list[StepResult]:
    """What the environment says to actions, to its end if it comes before theirs."""
    results: list[StepResult] = []
    for action in actions:
        results.append(await environment.step(action))
        if results[-1].is_done:
            break
    return results


async def judged(environment: WorkflowEnvironment, actions: Iterable[Message]) -> tuple[list[str], Score]:
    """What tools said to actions, and the verdict."""
    results = await play(environment, actions)
    return [message.content for result in results for message in result.messages], await environment.score()


def choices(records: Records, order_id: str) -> list[Message]:
    """Every choice that can be made for an order, right and wrong."""
    order = records.orders[order_id]
    customer = records.customers[order.customer]
    warehouses, carriers = records.items[order.item].warehouses, records.carriers[customer.town]
    return [
        *(call("reserve", order_id=order_id, warehouse=name) for name in warehouses.values()),
        *(call("issue_invoice", reservation=order.papers[0], tariff=tariff) for tariff in TARIFFS),
        *(call("book_carrier", parcel=order.papers[3], carrier=name) for name in carriers.values()),
    ]


def everything(records: Records) -> list[Message]:
    """Every call that is about something on file, for all orders."""
    of_all = plan(replace(records, asked=tuple(records.orders)))
    return [*of_all, *(choice for order_id in records.orders for choice in choices(records, order_id))]
