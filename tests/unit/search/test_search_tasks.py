"""What questions ask and need, against a reader of the documents' text that shares no code with their maker."""

from __future__ import annotations

import random
import re

import pytest

from agentrl.envs.definition import load_environment
from agentrl.types.errors import ConfigError
from agentrl.types.message import Message, Role
from agentrl.types.task import Split
from agentrl_environments.invented import COMMON_WORDS, names_of
from agentrl_environments.search import definition
from agentrl_environments.search.corpus import Document, load_corpus
from agentrl_environments.search.experts import EXPERTS
from agentrl_environments.search.tasks import SearchOptions, corpus_of, problem_of, sample_task
from agentrl_environments.search.world import BOOKS, FIRMS, PEOPLE, TOWNS
from tests.expert_play import mean_reward

OPTIONS = SearchOptions(num_documents=80, num_corpora=2)
NAME = r"(\w+ \w+)"
SAID = {
    "author": (rf"its author is {NAME}\.", rf"\. {NAME} wrote it\."),
    "publisher": (rf"its publisher is {NAME}\.", rf"\. {NAME} brought it out\."),
    "length": (r"its length is (\d+) pages\.", r"it has (\d+) pages\."),
    "home": (rf"their home is {NAME}\.", rf"\. {NAME} is where they live\."),
    "employer": (rf"their employer is {NAME}\.", rf"\. {NAME} employs them\."),
    "age": (r"their age is (\d+) years\.", r"they are (\d+) years old\."),
    "seat": (rf"its seat is {NAME}\.", rf"\. {NAME} is where it sits\."),
    "head": (rf"its head is {NAME}\.", rf"\. {NAME} leads it\."),
    "staff": (r"its staff is (\d+) people\.", r"(\d+) people work there\."),
    "mayor": (rf"its mayor is {NAME}\.", rf"\. {NAME} governs it\."),
    "size": (r"its size is (\d+) streets\.", r"it has (\d+) streets\."),
}


def answer_from(documents: list[Document], question: str) -> str | None:
    """What a reader of these documents alone can answer; None if they do not tell."""
    *relations, thing = (
        re.fullmatch(r"(?:who|what) is the (.*)\?", question)[1].replace(" of the ", " of ").split(" of ")
    )
    texts = {document.title: document.text for document in documents}
    for relation in reversed(relations):
        found = [match for said in SAID[relation] for match in re.findall(said, texts.get(thing, ""))]
        if not found:
            return None
        [thing] = found
    return thing


def all_documents(task) -> list[Document]:
    corpus = corpus_of(OPTIONS, task)
    return [corpus.search(title, 1)[0] for title in corpus.things]


@pytest.mark.parametrize("split", list(Split))
def test_all_documents_tell_the_answer_and_without_any_on_the_path_nobody_knows_it(split):
    for ordinal in range(60):
        task = sample_task(OPTIONS, split, ordinal, 0)
        problem, documents = problem_of(OPTIONS, task), all_documents(task)
        assert answer_from(documents, problem.question) == problem.answer
        on_path = [document for document in documents if document.title in problem.path]
        assert answer_from(on_path, problem.question) == problem.answer
        for missing in problem.path:
            rest = [document for document in documents if document.title != missing]
            assert answer_from(rest, problem.question) is None
        early = [document.text for document in on_path if document.title != problem.path[-1]]
        assert not any(re.search(rf"\b{problem.answer}\b", text) for text in early), "fewer documents tell it"
        assert problem.answer not in problem.question


@pytest.mark.parametrize("hops", [(2,), (3,), (2, 3)])
def test_an_answer_needs_as_many_documents_as_the_options_say(hops):
    options = SearchOptions(num_documents=80, num_corpora=2, hops=hops)
    found = [problem_of(options, sample_task(options, Split.TRAIN, n, 0)) for n in range(60)]
    assert {len(problem.path) for problem in found} == set(hops)
    assert all(problem.question.count(" of ") == len(problem.path) for problem in found)


def test_the_splits_share_no_name_but_every_word():
    names = {}
    for split in Split:
        corpora = {corpus_of(OPTIONS, sample_task(OPTIONS, split, n, seed)) for n in range(2) for seed in range(5)}
        names[split] = {name for corpus in corpora for name in corpus.things}
        assert len(names[split]) > 80
    assert names[Split.TRAIN] & names[Split.HELDOUT] == set()
    words = {word for name in names[Split.TRAIN] for word in name.split()}
    assert {word for name in names[Split.HELDOUT] for word in name.split()} <= words


def test_the_largest_corpus_finds_enough_names_in_either_split():
    for first, second in ((COMMON_WORDS, BOOKS), (PEOPLE, COMMON_WORDS), (COMMON_WORDS, FIRMS), (COMMON_WORDS, TOWNS)):
        assert min(len(names_of(first, second, split)) for split in Split) >= 200


def test_equal_arguments_give_equal_tasks_and_held_out_ones_whatever_the_seed():
    def told(split: Split, seed: int) -> list[str]:
        tasks = [sample_task(OPTIONS, split, n, seed) for n in range(10)]
        return [f"{problem_of(OPTIONS, task)} {all_documents(task)[0]}" for task in tasks]

    before = told(Split.TRAIN, 0)
    load_corpus.cache_clear()
    assert told(Split.TRAIN, 0) == before
    assert told(Split.TRAIN, 1) != before
    assert told(Split.HELDOUT, 0) == told(Split.HELDOUT, 1)


@pytest.mark.parametrize("split", list(Split))
async def test_the_expert_is_always_right(split):
    assert await mean_reward(definition, OPTIONS, "expert", 60, split) == 1.0


async def test_the_clumsy_expert_is_right_about_25_times_in_100_and_chance_almost_never():
    assert 0.18 < await mean_reward(definition, OPTIONS, "clumsy", 400) < 0.32
    assert await mean_reward(definition, OPTIONS, "random", 200) < 0.02


def test_an_expert_reads_what_its_search_has_listed_and_answers_when_it_has_read_all():
    task = sample_task(OPTIONS, Split.TRAIN, 0, 0)
    first = problem_of(OPTIONS, task).path[0]
    asked = [Message(Role.USER, "?"), Message(Role.ASSISTANT, ""), Message(Role.TOOL, f"a10 no {first}\nb20 {first}")]
    reading = EXPERTS["expert"].act(OPTIONS, task, asked, random.Random(0))
    assert reading.tool_calls[0].arguments == {"document_id": "b20"}


def test_the_environment_is_registered_and_refuses_options_that_it_cannot_keep():
    definition = load_environment("search")
    for wrong in ({"hops": [4]}, {"hops": []}, {"num_documents": 4000}, {"num_documents": 42}, {"num_corpora": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            definition.parse_options(wrong)
