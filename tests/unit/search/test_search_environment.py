from __future__ import annotations

import gc
import math
import re
import sqlite3
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.types.errors import ConfigError
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.task import Split
from agentrl_environments.search import corpus as corpus_module
from agentrl_environments.search.corpus import Corpus, load_corpus
from agentrl_environments.search.environment import SearchEnvironment, normalise
from agentrl_environments.search.tasks import SearchOptions, corpus_of, problem_of, sample_task

OPTIONS = SearchOptions(num_documents=80, num_corpora=2)
TASK = sample_task(OPTIONS, Split.TRAIN, 3, 0)
PROBLEM = problem_of(OPTIONS, TASK)
CORPUS = corpus_of(OPTIONS, TASK)


async def observe(environment: SearchEnvironment, name: str, **arguments) -> str:
    result = await environment.step(Message(Role.ASSISTANT, "", (ToolCall("c", name, arguments),)))
    [message] = result.messages
    assert (message.role, message.tool_call_id, result.is_done) == (Role.TOOL, "c", False)
    return message.content


async def judge(environment: SearchEnvironment, answer: str) -> float | None:
    assert (await environment.step(Message(Role.ASSISTANT, answer))).is_done
    return (await environment.score()).reward


async def test_searching_reading_and_answering_scores_one():
    environment = SearchEnvironment(OPTIONS, TASK)
    assert (await environment.start()).messages[-1].content == PROBLEM.question
    for name in PROBLEM.path:
        line = (await observe(environment, "search", query=name)).splitlines()[0]
        document_id, title = line.split(" ", 1)
        assert title == name
        assert (await observe(environment, "read", document_id=document_id)).startswith(f"{name} is a ")
    assert await judge(environment, f"  {PROBLEM.answer.upper()}. ") == 1.0
    read = float(len(PROBLEM.path))
    assert (await environment.score()).metrics == {"searches": read, "documents_read": read, "path_read": 1.0}


@pytest.mark.parametrize("answer", ["", "unknown", f"the answer is {PROBLEM.answer}", PROBLEM.path[-1], "."])
async def test_anything_else_scores_nothing(answer):
    assert await judge(SearchEnvironment(OPTIONS, TASK), answer) == 0.0


async def test_an_episode_that_never_answered_scores_nothing():
    assert (await SearchEnvironment(OPTIONS, TASK).score()).reward == 0.0


@pytest.mark.parametrize(
    ("text", "normal"),
    [(" Ada  Oak.\n", "ada oak"), ("31", "31"), ("ADA\tOAK", "ada oak"), ("Ada Oak .", "ada oak"), ("...", "")],
)
def test_case_spaces_and_a_final_stop_do_not_matter(text, normal):
    assert normalise(text) == normal


@pytest.mark.parametrize("split", list(Split))
def test_the_name_of_a_thing_finds_its_document_first_and_others_that_share_a_word_behind(split):
    corpus = load_corpus(split, "0-0", 200)
    for name in corpus.things:
        found = corpus.search(name, 3)
        assert found[0].title == name
        assert all(set(name.split()) & set(document.text.replace(".", " ").split()) for document in found)


def bm25(corpus: Corpus, query: str) -> dict[str, float]:
    """Okapi BM25 as its authors wrote it down, with a word of a title counted four times; by document."""
    texts = [corpus.search(title, 1)[0] for title in corpus.things]
    words = {d.id: d.title.split() * 4 + re.findall(r"\w+", d.text) for d in texts}
    lengths = {d.id: len(d.title.split()) + len(re.findall(r"\w+", d.text)) for d in texts}
    mean_length = sum(lengths.values()) / len(texts)
    scores = dict.fromkeys(words, 0.0)
    for word in query.split():
        have = [id for id, known in words.items() if word in known]
        rarity = math.log((len(texts) - len(have) + 0.5) / (len(have) + 0.5))
        for id in have:
            count = words[id].count(word)
            scores[id] += rarity * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * lengths[id] / mean_length))
    return scores


def test_documents_come_in_the_order_of_a_bm25_that_was_worked_out_word_by_word():
    for query in ("oak", "silver ferry", "ada oak brewery", " ".join(list(CORPUS.things)[:3])):
        scores = bm25(CORPUS, query)
        best = sorted((score for score in scores.values() if score > 0), reverse=True)[:8]
        assert [scores[document.id] for document in CORPUS.search(query, 8)] == pytest.approx(best)


async def test_what_is_not_there_is_an_observation():
    environment = SearchEnvironment(OPTIONS, TASK)
    assert await observe(environment, "search", query="zeppelin") == "nothing found"
    assert await observe(environment, "read", document_id="z1") == "error: no document 'z1'; search lists ids"
    assert await observe(environment, "find") == "error: no tool 'find'; there are search, read"
    assert "less than or equal to 10" in await observe(environment, "search", query="oak", limit=11)


async def test_a_search_lists_as_many_as_it_may():
    environment = SearchEnvironment(OPTIONS, TASK)
    assert len((await observe(environment, "search", query="is")).splitlines()) == 3
    assert len((await observe(environment, "search", query="is", limit=7)).splitlines()) == 7


ODD_QUERIES = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from(['"', "oak", "AND", "NOT", "NEAR(", "*", "title:", "^", "-", "_", "\0"])).map(" ".join),
)


@given(ODD_QUERIES)
def test_no_query_is_a_fault_and_operators_are_plain_words(query):
    found = CORPUS.search(query, 5)
    assert len(found) <= 5
    assert all(CORPUS.read(document.id) == document for document in found)


def test_a_query_of_any_length_is_answered():
    assert CORPUS.search(" ".join(f"w{n}" for n in range(5000)), 3) == []


def test_a_corpus_is_made_once_and_the_oldest_of_too_many_is_let_go(monkeypatch):
    load_corpus.cache_clear()
    kept = weakref.ref(load_corpus(Split.TRAIN, "kept", 40))
    assert load_corpus(Split.TRAIN, "kept", 40) is kept()
    for number in range(32):
        load_corpus(Split.TRAIN, f"{number}", 40)
    gc.collect()
    assert kept() is None
    assert load_corpus.cache_info().currsize == 32
    load_corpus.cache_clear()


def test_the_index_of_a_corpus_ends_with_it():
    corpus = Corpus(Split.TRAIN, "short-lived", 40)
    index = corpus._index
    del corpus
    gc.collect()
    with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
        index.execute("SELECT 1")


def test_a_python_without_a_full_text_index_is_named(monkeypatch):
    class Bare(sqlite3.Connection):
        def execute(self, *arguments):
            raise sqlite3.OperationalError("no such module: fts5")

    plain = sqlite3.connect
    monkeypatch.setattr(corpus_module.sqlite3, "connect", lambda path, **named: plain(path, factory=Bare, **named))
    with pytest.raises(
        ConfigError, match=r"no full-text index: no such module: fts5; play the environment 'search' by"
    ):
        Corpus(Split.TRAIN, "0", 40)
