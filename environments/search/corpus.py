"""The documents of an invented world, behind a full-text index of SQLite (FTS5); built once in a process."""

from __future__ import annotations

import random
import re
import sqlite3
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from agentrl.types.errors import ConfigError
from agentrl.types.task import Split
from agentrl_environments.search.world import KINDS, NUMBERS, Thing, describe, invent

MAX_QUERY_WORDS = 32
_TITLE_WEIGHT = 4.0  # of a word that is found in a title, against one in the text
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Document:
    """A text about one thing, which is its title.

    Example: ``Document("k31", "silver ferry", "silver ferry is a town. ada oak governs it. it has 31 streets.")``.
    """

    id: str
    title: str
    text: str


class Corpus:
    """All documents of one world; nothing in it changes, so that all episodes of a process may share it.

    Raises:
        ConfigError: this Python's SQLite has no FTS5.

    Example: ``corpus.search("silver ferry", 2)`` gives the document with that title, then one that has a word of it.
    """

    def __init__(self, split: Split, seed: str, num_documents: int) -> None:
        chance = random.Random(f"{split}-{seed}-{num_documents}")
        things = list(invent(split, num_documents // len(KINDS), chance))
        chance.shuffle(things)
        self.things: Mapping[str, Thing] = {thing.name: thing for thing in things}
        ids = chance.sample([f"{letter}{number}" for letter in _LETTERS for number in NUMBERS], len(things))
        documents = [Document(id, t.name, describe(t, chance)) for id, t in zip(ids, things, strict=True)]
        self._documents = {document.id: document for document in documents}
        self._index = _index_of(documents)
        weakref.finalize(self, self._index.close)

    def __len__(self) -> int:
        return len(self._documents)

    def search(self, query: str, limit: int) -> list[Document]:
        """Documents that have some word of the query, the best first, by BM25; operators in it are plain words."""
        words = list(dict.fromkeys(re.findall(r"[^\W_]+", query.casefold())))[:MAX_QUERY_WORDS]
        if not words:
            return []
        asked = " OR ".join(f'"{word}"' for word in words)
        rows = self._index.execute(
            "SELECT id FROM documents WHERE documents MATCH ? ORDER BY bm25(documents, 0, ?, 1), rowid LIMIT ?",
            (asked, _TITLE_WEIGHT, limit),
        )
        return [self._documents[id] for (id,) in rows.fetchall()]

    def read(self, document_id: str) -> Document | None:
        """The document of that id, if there is one."""
        return self._documents.get(document_id)


@lru_cache(maxsize=32)
def load_corpus(split: Split, seed: str, num_documents: int) -> Corpus:
    """The corpus of these arguments: made when it is first asked for, and kept while it is among the last 32."""
    return Corpus(split, seed, num_documents)


def _index_of(documents: list[Document]) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    try:
        connection.execute("CREATE VIRTUAL TABLE documents USING fts5(id UNINDEXED, title, text)")
    except sqlite3.OperationalError as error:
        connection.close()
        raise ConfigError(
            f"SQLite {sqlite3.sqlite_version} of this Python has no full-text index: {error}; play the environment "
            "'search' by a Python whose SQLite has FTS5 (environment.interpreter)"
        ) from None
    rows = [(document.id, document.title, document.text) for document in documents]
    connection.executemany("INSERT INTO documents VALUES (?, ?, ?)", rows)
    return connection
