"""Makes one problem of a seed: a schema, its rows, a question in plain words and the SQL that answers it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from agentrl.config.base import ConfigModel
from agentrl.types.task import Split, Task
from agentrl_environments.splits import split_of
from agentrl_environments.sql.names import PEOPLE, identifiers

NUM_COLUMNS = 3


class SqlOptions(ConfigModel):
    """What problems look like and what a query may cost."""

    num_rows: int = 5
    """Rows of the table; more make counting questions harder. 2 to 24."""
    query_s: float = 0.5
    """Seconds that one query may run before it is stopped."""
    max_result_rows: int = 8
    """Rows that the policy sees of a result; the rest is named as cut."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of question: its phrasings and its query, with ``{t} {c} {n} {p}`` to be filled.

    `{t}` table, `{c}` column, `{n}` number, `{p}` person.
    """

    name: str
    phrasings: tuple[str, str, str]
    query: str
    answers_with_name: bool = False


KINDS = (
    Kind(
        "max",
        ("what is the highest {c}?", "give the largest {c}.", "how high does {c} go?"),
        "SELECT MAX({c}) FROM {t}",
    ),
    Kind(
        "min",
        ("what is the lowest {c}?", "give the smallest {c}.", "how low does {c} go?"),
        "SELECT MIN({c}) FROM {t}",
    ),
    Kind(
        "above",
        ("how many have {c} above {n}?", "count those with {c} over {n}.", "how many exceed {n} in {c}?"),
        "SELECT COUNT(*) FROM {t} WHERE {c} > {n}",
    ),
    Kind(
        "below",
        ("how many have {c} below {n}?", "count those with {c} under {n}.", "how many fall short of {n} in {c}?"),
        "SELECT COUNT(*) FROM {t} WHERE {c} < {n}",
    ),
    Kind(
        "lookup",
        ("what is the {c} of {p}?", "give {c} for {p}.", "which {c} does {p} have?"),
        "SELECT {c} FROM {t} WHERE name = '{p}'",
    ),
    Kind(
        "find",
        ("who has {n} in {c}?", "name the one whose {c} is {n}.", "which one has {c} of {n}?"),
        "SELECT name FROM {t} WHERE {c} = {n}",
        answers_with_name=True,
    ),
    Kind(
        "who_max",
        ("who has the highest {c}?", "name the one with the largest {c}.", "whose {c} is the highest?"),
        "SELECT name FROM {t} ORDER BY {c} DESC LIMIT 1",
        answers_with_name=True,
    ),
    Kind(
        "who_min",
        ("who has the lowest {c}?", "name the one with the smallest {c}.", "whose {c} is the lowest?"),
        "SELECT name FROM {t} ORDER BY {c} LIMIT 1",
        answers_with_name=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A table with its rows, a question about it, and the query whose result is the right answer.

    The question names a column but not the table, so the schema has to be looked at.

    Example: table ``net_stock(name, unit_cost, rear_load, peak_rate)``, question ``who has the lowest
    rear_load?``, query ``SELECT name FROM net_stock ORDER BY rear_load LIMIT 1``.
    """

    table: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | int, ...], ...]
    kind: Kind
    column: str
    number: int
    person: str
    question: str

    @property
    def query(self) -> str:
        """The SQL that answers the question."""
        return self.query_on(self.table)

    def query_on(self, table: str) -> str:
        """The same query asked of another table name."""
        return self.kind.query.format(t=table, c=self.column, n=self.number, p=self.person)


def sample_task(options: SqlOptions, split: Split, ordinal: int, seed: int) -> Task:
    """The task of that ordinal; held-out tasks are the same whatever the run's seed."""
    own_seed = seed if split is Split.TRAIN else 0
    return Task("sql", split, ordinal, {"seed": f"{split}-{own_seed}-{ordinal}"})


@lru_cache(maxsize=512)
def build_problem(options: SqlOptions, seed: str, split: Split) -> Problem:
    """The problem that a task's seed stands for: equal seeds give equal problems."""
    rng = random.Random(seed)
    table, *columns = rng.sample(identifiers(split), NUM_COLUMNS + 1)
    people = rng.sample(PEOPLE, options.num_rows)
    rows = _sample_rows(rng, split, people)
    kind = rng.choice(KINDS)
    index = rng.randrange(NUM_COLUMNS)
    column = columns[index]
    number = rng.choice(rows)[index + 1] if kind.name == "find" else rng.randint(20, 89)
    person = rng.choice(people)
    question = rng.choice(kind.phrasings).format(c=column, n=number, p=person)
    return Problem(table, tuple(columns), rows, kind, column, int(number), person, question)


def _sample_rows(rng: random.Random, split: Split, people: list[str]) -> tuple[tuple[str | int, ...], ...]:
    """Rows of the split, with values from 10 to 99 that do not repeat within a column."""
    used: list[set[int]] = [set() for _ in range(NUM_COLUMNS)]
    rows: list[tuple[str | int, ...]] = []
    for person in people:
        while True:
            values = [rng.randint(10, 99) for _ in range(NUM_COLUMNS)]
            is_new = all(value not in seen for value, seen in zip(values, used, strict=True))
            if is_new and split_of(f"{person} {values}") is split:
                break
        for value, seen in zip(values, used, strict=True):
            seen.add(value)
        rows.append((person, *values))
    return tuple(rows)
