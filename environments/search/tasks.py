"""Makes one question of a seed: a thing, what is asked of it, and the documents that the answer needs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.base import ConfigModel
from agentrl.types.task import Split, Task
from agentrl_environments.search.corpus import Corpus, load_corpus
from agentrl_environments.search.world import FROM, Relation


class SearchOptions(ConfigModel):
    """How far an answer is, and in how many documents it hides."""

    hops: Annotated[tuple[Literal[2, 3], ...], Field(min_length=1)] = (2, 3)
    """Documents that an answer needs, one after the other; each task has one of these numbers."""
    num_documents: Annotated[int, Field(ge=40, le=800, multiple_of=4)] = 200
    """Documents of a corpus, a quarter of them about books, people, firms and towns each. More make a careless search
    worth less."""
    num_corpora: Annotated[int, Field(ge=1, le=32)] = 16
    """Corpora that a run's training tasks are about, and held-out tasks as many others. A policy can learn a single one
    by heart; each takes a process half a megabyte at 200 documents."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, the things on the way to its answer, and the answer.

    Example: question ``who is the mayor of the home of ada oak?``, path ``("ada oak", "silver ferry")``, answer
    ``hugo elm``: the first document names the home, the second its mayor.
    """

    question: str
    path: tuple[str, ...]
    answer: str


def sample_task(options: SearchOptions, split: Split, ordinal: int, seed: int) -> Task:
    """The task of that ordinal; held-out tasks are the same whatever the run's seed."""
    own_seed = seed if split is Split.TRAIN else 0
    corpus = f"{own_seed}-{ordinal % options.num_corpora}"
    return Task("search", split, ordinal, {"seed": f"{split}-{own_seed}-{ordinal}", "corpus": corpus})


def corpus_of(options: SearchOptions, task: Task) -> Corpus:
    """The corpus that a task is about, made if this process does not have it. Raises ConfigError without FTS5."""
    return load_corpus(task.split, task.payload["corpus"], options.num_documents)


def problem_of(options: SearchOptions, task: Task) -> Problem:
    """The problem that a task stands for: equal tasks give equal problems."""
    return _build(options, task.split, task.payload["seed"], task.payload["corpus"])


@lru_cache(maxsize=512)
def _build(options: SearchOptions, split: Split, seed: str, corpus_seed: str) -> Problem:
    corpus = load_corpus(split, corpus_seed, options.num_documents)
    chance = random.Random(seed)
    num_hops = chance.choice(options.hops)
    names = sorted(corpus.things)
    while True:
        relations, path = _walk(corpus, chance, chance.choice(names), num_hops)
        if len(set(path)) == len(path) and not _is_told_early(corpus, path):
            return Problem(_ask(relations, path[0]), path[:-1], path[-1])


def _walk(corpus: Corpus, chance: random.Random, name: str, num_hops: int) -> tuple[list[Relation], tuple[str, ...]]:
    """Relations that lead from a thing to an answer, and all that is met on the way, both ends included."""
    relations: list[Relation] = []
    path = [name]
    for hop in range(num_hops):
        thing = corpus.things[path[-1]]
        is_last = hop == num_hops - 1
        relations.append(chance.choice([r for r in FROM[thing.kind] if is_last or r.target is not None]))
        path.append(thing.facts[relations[-1].name])
    return relations, tuple(path)


def _is_told_early(corpus: Corpus, path: tuple[str, ...]) -> bool:
    """Whether an earlier document than the last has the answer, so that fewer would do."""
    return any(path[-1] in corpus.things[name].facts.values() for name in path[:-2])


def _ask(relations: list[Relation], name: str) -> str:
    *earlier, last = relations
    asked = "".join(f"the {relation.name} of " for relation in [last, *reversed(earlier)])
    return f"{'who' if last.target == 'person' else 'what'} is {asked}{name}?"
