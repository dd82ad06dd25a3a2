"""An invented world: books, people, firms and towns, what is true of them, and how documents say so."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.types.task import Split
from agentrl_environments.invented import COMMON_WORDS, names_of

BOOKS = tuple(
    "anthem ballad chronicle dream echo fable hymn journal lament legend letter lullaby memoir mirror oath omen "
    "parable promise prophecy riddle saga secret shadow song".split()
)
PEOPLE = tuple(
    "ada bob cora dan eva finn gwen hugo iris jack kira leo mona ned olga paul quin rosa seth tara uma vera wade "
    "yuri".split()
)
FIRMS = tuple(
    "bakery bank brewery cannery dairy depot dock dyers exchange forge foundry gallery garage kiln laundry lodge mills "
    "pottery press refinery store tannery weavers works".split()
)
TOWNS = tuple(
    "abbey beach bridge castle cliff corner cross dale falls ferry ford gate green grove harbour heath hill hollow "
    "lake market moor port vale well".split()
)
_WORDS = {
    "book": (COMMON_WORDS, BOOKS),
    "person": (PEOPLE, COMMON_WORDS),
    "firm": (COMMON_WORDS, FIRMS),
    "town": (COMMON_WORDS, TOWNS),
}
KINDS = tuple(_WORDS)
NUMBERS = range(10, 100)


@dataclass(frozen=True, slots=True)
class Relation:
    """What leads from a thing to another one, or to a number where `target` is None; `{}` is the other one's place.

    Example: of the town ``silver ferry`` the relation ``mayor`` says ``its mayor is ada oak.``
    """

    name: str
    source: str
    target: str | None
    phrasings: tuple[str, str]


RELATIONS = (
    Relation("author", "book", "person", ("its author is {}.", "{} wrote it.")),
    Relation("publisher", "book", "firm", ("its publisher is {}.", "{} brought it out.")),
    Relation("length", "book", None, ("its length is {} pages.", "it has {} pages.")),
    Relation("home", "person", "town", ("their home is {}.", "{} is where they live.")),
    Relation("employer", "person", "firm", ("their employer is {}.", "{} employs them.")),
    Relation("age", "person", None, ("their age is {} years.", "they are {} years old.")),
    Relation("seat", "firm", "town", ("its seat is {}.", "{} is where it sits.")),
    Relation("head", "firm", "person", ("its head is {}.", "{} leads it.")),
    Relation("staff", "firm", None, ("its staff is {} people.", "{} people work there.")),
    Relation("mayor", "town", "person", ("its mayor is {}.", "{} governs it.")),
    Relation("size", "town", None, ("its size is {} streets.", "it has {} streets.")),
)
FROM = {kind: tuple(relation for relation in RELATIONS if relation.source == kind) for kind in KINDS}


@dataclass(frozen=True, slots=True)
class Thing:
    """A thing of the world and all that is true of it, by the names of relations.

    Example: ``Thing("silver ferry", "town", {"mayor": "ada oak", "size": "31"})``.
    """

    name: str
    kind: str
    facts: Mapping[str, str]


def invent(split: Split, num_each: int, chance: random.Random) -> tuple[Thing, ...]:
    """A world of so many things of each kind; the splits share no name."""
    names = {kind: chance.sample(names_of(*words, split), num_each) for kind, words in _WORDS.items()}

    def fact(relation: Relation) -> str:
        return str(chance.choice(NUMBERS)) if relation.target is None else chance.choice(names[relation.target])

    return tuple(
        Thing(name, kind, {relation.name: fact(relation) for relation in FROM[kind]})
        for kind, of_kind in names.items()
        for name in of_kind
    )


def describe(thing: Thing, chance: random.Random) -> str:
    """A document about a thing: what it is, and its facts in any order and phrasing."""
    told = [chance.choice(relation.phrasings).format(thing.facts[relation.name]) for relation in FROM[thing.kind]]
    chance.shuffle(told)
    return " ".join([f"{thing.name} is a {thing.kind}.", *told])
