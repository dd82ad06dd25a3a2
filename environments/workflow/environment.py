"""The workflow environment: orders are taken from open to delivered by steps of which each needs the one before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from agentrl.envs.authoring import ToolEnvironment, tool
from agentrl.types.environment import Score, StepResult
from agentrl.types.message import Message, Role
from agentrl_environments.workflow.tasks import WorkflowOptions, build_records
from agentrl_environments.workflow.world import GRADES, HANDLINGS, TARIFFS, RefusedError, Stage, World

Record = TypeVar("Record")

RULES = (
    "You deliver orders, one after the other. Reserve the goods in the warehouse that has the ordered grade. Invoice "
    "by the customer's tariff, collect the payment, and release the goods for the receipt. Book a carrier of the "
    "customer's town that handles what the parcel needs, dispatch the shipment, and close the order with the slip. "
    "Nothing can be undone. Leave other orders alone."
)


class WorkflowEnvironment(ToolEnvironment[WorkflowOptions]):
    """One or more orders to deliver.

    What cannot be done is refused, and the episode goes on; what was chosen wrongly is carried out, and the order comes
    back when it is closed. The episode ends with the last close, or with a message that calls no tool.

    To look for the wrong stock or carrier spoils nothing yet; to reserve or book what was found does.

    With `turn_rewards` a spoilt task has -1 for the turn that spoilt it and 1 for its last. What is still to come is
    then 0 up to the mistake, and behind it 1, as where all goes well: a credit that goes by turns blames the mistake
    and not what followed it. A turn's index is the number of steps before it, as with `tool_calling`.

    Example: `agentrl env run workflow --policy expert` shows the eleven calls.
    """

    def prepare(self) -> None:
        """Make the records; nothing is done yet."""
        self._world = World(build_records(self.options, self.task.payload["seed"], self.task.split))
        self._num_turns = 0
        self._num_refused = 0
        self._spoilt_turn: int | None = None

    def prompt(self) -> Sequence[Message]:
        """The rules, and which orders are to be delivered."""
        asked = " and then ".join(self._world.records.asked)
        return (Message(Role.SYSTEM, RULES), Message(Role.USER, f"deliver {asked}."))

    @tool
    def read_order(self, order_id: str) -> str:
        """Tell customer, item and grade of an order."""
        order = _found(self._world.records.orders, "order", order_id)
        return f"customer {order.customer}, item {order.item}, grade {order.grade}"

    @tool
    def read_customer(self, customer: str) -> str:
        """Tell town and tariff of a customer."""
        found = _found(self._world.records.customers, "customer", customer)
        return f"town {found.town}, tariff {found.tariff}"

    @tool
    def find_stock(self, item: str, grade: str) -> str:
        """Find the warehouse that has an item in a grade."""
        warehouses = _found(self._world.records.items, "item", item).warehouses
        return f"warehouse {warehouses[_one_of(GRADES, 'grade', grade)]}"

    @tool
    def find_carrier(self, town: str, handling: str) -> str:
        """Find the carrier of a town for goods that are to be handled in a way."""
        carriers = _found(self._world.records.carriers, "town", town)
        return f"carrier {carriers[_one_of(HANDLINGS, 'handling', handling)]}"

    @tool
    def reserve(self, order_id: str, warehouse: str) -> str:
        """Reserve an order's goods in a warehouse."""
        return f"reservation {self._world.begin(order_id, warehouse)}"

    @tool
    def issue_invoice(self, reservation: str, tariff: str) -> str:
        """Issue the invoice for a reservation by a tariff."""
        known = _one_of(TARIFFS, "tariff", tariff)
        return f"invoice {self._world.go_on(reservation, Stage.RESERVED, tariff=known)[1]}"

    @tool
    def collect_payment(self, invoice: str) -> str:
        """Collect the payment of an invoice."""
        return f"receipt {self._world.go_on(invoice, Stage.INVOICED)[1]}"

    @tool
    def release_goods(self, receipt: str) -> str:
        """Have the goods packed for a receipt."""
        order_id, parcel = self._world.go_on(receipt, Stage.PAID)
        item = self._world.records.items[self._world.records.orders[order_id].item]
        return f"parcel {parcel}, handling {item.handling}"

    @tool
    def book_carrier(self, parcel: str, carrier: str) -> str:
        """Book a carrier for a parcel."""
        if not any(carrier in of_town.values() for of_town in self._world.records.carriers.values()):
            raise RefusedError(f"no carrier '{carrier}'")
        return f"shipment {self._world.go_on(parcel, Stage.RELEASED, carrier=carrier)[1]}"

    @tool
    def dispatch(self, shipment: str) -> str:
        """Send a shipment on its way."""
        return f"slip {self._world.go_on(shipment, Stage.BOOKED)[1]}"

    @tool
    def close_order(self, order_id: str, slip: str) -> str:
        """Close an order with the slip of its shipment, and hear what became of it."""
        said = self._world.close(order_id, slip)
        if self._world.is_done:
            self.finish()
        return said

    async def step(self, action: Message) -> StepResult:
        """Carry out the calls, and note whether they spoilt the task; so does an end that comes too early."""
        result = await super().step(action)
        is_lost = self._world.is_spoilt or (result.is_done and not self._world.is_done)
        if is_lost and self._spoilt_turn is None:
            self._spoilt_turn = self._num_turns
        self._num_turns += 1
        self._num_refused += sum(message.content.startswith("error: ") for message in result.messages)
        return result

    def reward(self) -> Score:
        """1.0 if all orders that were asked for, and nothing else, were delivered rightly, else 0.0."""
        is_right = self._world.is_done and not self._world.is_spoilt
        metrics = {
            "closed_orders": float(self._world.num_closed),
            "refused_calls": float(self._num_refused),
            "spoilt": float(self._spoilt_turn is not None),
        }
        return Score(float(is_right), metrics, turn_rewards=self._turn_rewards())

    def save(self) -> dict[str, Any]:
        """What was done, and the counts."""
        return {
            "world": self._world.save(),
            "turns": self._num_turns,
            "refused": self._num_refused,
            "spoilt_turn": self._spoilt_turn,
        }

    def load(self, state: Any) -> None:
        """Be where the instance was that gave this."""
        self._world.load(state["world"])
        self._num_turns, self._num_refused = state["turns"], state["refused"]
        self._spoilt_turn = state["spoilt_turn"]

    def _turn_rewards(self) -> dict[int, float]:
        last = self._num_turns - 1
        if not self.options.turn_rewards or self._spoilt_turn in (None, last):
            return {}
        return {self._spoilt_turn: -1.0, last: 1.0}


def _found(records: Mapping[str, Record], noun: str, name: str) -> Record:
    if name not in records:
        raise RefusedError(f"no {noun} '{name}'")
    return records[name]


def _one_of(known: Sequence[str], noun: str, name: str) -> str:
    if name not in known:
        raise RefusedError(f"no {noun} '{name}'; there are {', '.join(known)}")
    return name
