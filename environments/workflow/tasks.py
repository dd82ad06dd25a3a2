"""Makes the records of one task of a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated

from pydantic import Field

from agentrl.config.base import ConfigModel
from agentrl.types.task import Split, Task
from agentrl_environments.invented import COMMON_WORDS, names_of
from agentrl_environments.workflow.world import GRADES, HANDLINGS, PAPERS, TARIFFS, Customer, Item, Order, Records

CUSTOMERS = tuple("bakery bank brewery dairy gallery garage hotel inn library school theatre works".split())
ITEMS = tuple("bench bowl chair chest clock cup desk door lamp shelf stool vase".split())
TOWNS = tuple("bridge castle cross falls ferry harbour hill lake market moor port vale".split())
WAREHOUSES = tuple("barn cellar depot dock hall loft shed silo store tower vault yard".split())
CARRIERS = tuple("barge cart coach freight line lorry post rail runner ship van wagon".split())
PAPER_LETTERS = dict(zip(PAPERS, "ritpsd", strict=True))


class WorkflowOptions(ConfigModel):
    """How long a task is."""

    num_orders: Annotated[int, Field(ge=1, le=4)] = 1
    """Orders that are to be delivered, by eleven calls each."""
    num_others: Annotated[int, Field(ge=0, le=8)] = 2
    """Open orders of others, which are not to be touched."""
    turn_rewards: bool = False
    """Say by rewards of turns which turn spoilt a task; they sum to 0. Set it for the credit ``turn_leave_one_out``,
    where no other scorer of turns says what states are worth."""


def sample_task(options: WorkflowOptions, split: Split, ordinal: int, seed: int) -> Task:
    """The task of that ordinal; held-out tasks are the same whatever the run's seed."""
    own_seed = seed if split is Split.TRAIN else 0
    return Task("workflow", split, ordinal, {"seed": f"{split}-{own_seed}-{ordinal}"})


@lru_cache(maxsize=512)
def build_records(options: WorkflowOptions, seed: str, split: Split) -> Records:
    """The records that a task's seed stands for: equal seeds give equal records; the splits share no name."""
    chance = random.Random(seed)
    num_orders = options.num_orders + options.num_others
    codes = {letter: _codes(letter, chance) for letter in ("o", *PAPER_LETTERS.values())}
    names = {words: _names(words, split, chance) for words in (CUSTOMERS, ITEMS, TOWNS, WAREHOUSES, CARRIERS)}
    orders: dict[str, Order] = {}
    customers: dict[str, Customer] = {}
    items: dict[str, Item] = {}
    carriers: dict[str, dict[str, str]] = {}
    for _ in range(num_orders):
        customer, item, town = (next(names[words]) for words in (CUSTOMERS, ITEMS, TOWNS))
        customers[customer] = Customer(town, chance.choice(TARIFFS))
        items[item] = Item(chance.choice(HANDLINGS), {grade: next(names[WAREHOUSES]) for grade in GRADES})
        carriers[town] = {handling: next(names[CARRIERS]) for handling in HANDLINGS}
        papers = tuple(next(codes[letter]) for letter in PAPER_LETTERS.values())
        orders[next(codes["o"])] = Order(customer, item, chance.choice(GRADES), papers)
    asked = tuple(chance.sample(sorted(orders), options.num_orders))
    return Records(asked, orders, customers, items, carriers)


def _codes(letter: str, chance: random.Random) -> Iterator[str]:
    return iter([f"{letter}{number}" for number in chance.sample(range(10, 100), 90)])


def _names(words: tuple[str, ...], split: Split, chance: random.Random) -> Iterator[str]:
    known = names_of(COMMON_WORDS, words, split)
    return iter(chance.sample(known, len(known)))
