"""Records of a small trading firm, and the rules by which an order becomes a delivery, step by step.

Nothing can be undone, and a wrong choice is taken as it is: what comes of it shows when the order is closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Any

from agentrl.envs.authoring import ToolError

GRADES = ("red", "blue", "green")
TARIFFS = ("basic", "trade", "special")
HANDLINGS = ("cold", "dry", "frail")


class Stage(IntEnum):
    """How far an order has come; each step takes it to the next."""

    OPEN = 0
    RESERVED = 1
    INVOICED = 2
    PAID = 3
    RELEASED = 4
    BOOKED = 5
    DISPATCHED = 6
    CLOSED = 7


PAPERS = ("reservation", "invoice", "receipt", "parcel", "shipment", "slip")
"""What an order gets at each stage behind OPEN; the next step asks for it."""


@dataclass(frozen=True, slots=True)
class Customer:
    """Who orders: the town to deliver to, and the tariff that was agreed on."""

    town: str
    tariff: str


@dataclass(frozen=True, slots=True)
class Item:
    """What is traded: how it must be handled, and the warehouse that has it, by grade."""

    handling: str
    warehouses: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Order:
    """Who wants what, in which grade. `papers` are the codes that it will get, one for each of `PAPERS`.

    Example: ``Order("amber bakery", "oak chair", "blue", ("r31", "i47", "t12", "p90", "s55", "d28"))``.
    """

    customer: str
    item: str
    grade: str
    papers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Records:
    """All that is on file, by name or id; `carriers` has those of each town, by what they handle.

    `asked` are the orders that are to be delivered; whoever touches others has failed.
    """

    asked: tuple[str, ...]
    orders: Mapping[str, Order]
    customers: Mapping[str, Customer]
    items: Mapping[str, Item]
    carriers: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Progress:
    """What was done for an order so far."""

    stage: Stage = Stage.OPEN
    warehouse: str = ""
    tariff: str = ""
    carrier: str = ""


class RefusedError(ToolError):
    """A step that cannot be taken; nothing has changed. The message is for the one who tried."""


class World:
    """The records and what was done with them.

    Example: an order of grade blue that was reserved where the item is red goes on through all stages; closing it gives
    ``returned: wrong grade``.
    """

    def __init__(self, records: Records) -> None:
        self.records = records
        self._progress = dict.fromkeys(records.orders, Progress())

    def progress_of(self, order_id: str) -> Progress:
        """How far an order is. Raises RefusedError if there is none of that id."""
        if order_id not in self._progress:
            raise RefusedError(f"no order '{order_id}'")
        return self._progress[order_id]

    def begin(self, order_id: str, warehouse: str) -> str:
        """Reserve the goods of an open order; returns its first paper. Raises RefusedError."""
        if self.progress_of(order_id).stage is not Stage.OPEN:
            raise RefusedError(f"order {order_id} is reserved already")
        item = self.records.orders[order_id].item
        if warehouse not in self.records.items[item].warehouses.values():
            raise RefusedError(f"no {item} in warehouse '{warehouse}'")
        return self._advance(order_id, warehouse=warehouse)

    def go_on(self, paper: str, stage: Stage, **choices: str) -> tuple[str, str]:
        """Take the step that a paper of that stage allows; returns the order's id and its next paper.

        Raises:
            RefusedError: there is no such paper yet, or it was used.
        """
        order_id = self.order_with(paper, stage)
        return order_id, self._advance(order_id, **choices)

    def close(self, order_id: str, slip: str) -> str:
        """Close a dispatched order; returns what became of the delivery. Raises RefusedError."""
        self.progress_of(order_id)
        if self.order_with(slip, Stage.DISPATCHED) != order_id:
            raise RefusedError(f"slip {slip} is of another order")
        self._progress[order_id] = replace(self._progress[order_id], stage=Stage.CLOSED)
        wrong = self.wrong_choices(order_id)
        return f"returned: wrong {', '.join(wrong)}" if wrong else "delivered"

    def order_with(self, paper: str, stage: Stage) -> str:
        """The order that has this paper and has come no further than to it. Raises RefusedError."""
        noun = PAPERS[stage - 1]
        for order_id, order in self.records.orders.items():
            reached = self._progress[order_id].stage
            if order.papers[stage - 1] == paper and reached >= stage:
                if reached > stage:
                    raise RefusedError(f"{noun} {paper} was used already")
                return order_id
        raise RefusedError(f"no {noun} '{paper}'")

    def wrong_choices(self, order_id: str) -> list[str]:
        """What was chosen wrongly for an order so far: of grade, tariff and carrier."""
        order, done = self.records.orders[order_id], self._progress[order_id]
        customer, item = self.records.customers[order.customer], self.records.items[order.item]
        is_wrong = {
            "grade": done.warehouse not in ("", item.warehouses[order.grade]),
            "tariff": done.tariff not in ("", customer.tariff),
            "carrier": done.carrier not in ("", self.records.carriers[customer.town][item.handling]),
        }
        return [name for name, wrong in is_wrong.items() if wrong]

    @property
    def is_spoilt(self) -> bool:
        """Whether something was done after which the task can no longer succeed."""
        touched = [order for order, done in self._progress.items() if done.stage is not Stage.OPEN]
        return any(order not in self.records.asked or self.wrong_choices(order) for order in touched)

    @property
    def num_closed(self) -> int:
        """How many of the orders that are asked for are closed, rightly or not."""
        return sum(self._progress[order].stage is Stage.CLOSED for order in self.records.asked)

    @property
    def is_done(self) -> bool:
        """Whether all orders that are asked for are closed."""
        return self.num_closed == len(self.records.asked)

    def save(self) -> dict[str, Any]:
        """What was done, as JSON."""
        return {order: asdict(done) for order, done in self._progress.items()}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Be where the world was that gave this."""
        self._progress = {order: Progress(**{**done, "stage": Stage(done["stage"])}) for order, done in saved.items()}

    def _advance(self, order_id: str, **choices: str) -> str:
        done = self._progress[order_id]
        self._progress[order_id] = replace(done, stage=Stage(done.stage + 1), **choices)
        return self.records.orders[order_id].papers[done.stage]
