"""The search environment: look for documents, read them, and answer what no single one of them tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from agentrl.envs.authoring import ToolEnvironment, ToolError, tool
from agentrl.types.environment import Score
from agentrl.types.message import Message, Role
from agentrl_environments.search.tasks import SearchOptions, corpus_of, problem_of

INSTRUCTION = (
    "Find the answer in the documents: search by the name of a thing, read its document, go on with what it names. "
    "Then answer with the name or the number alone."
)


class SearchEnvironment(ToolEnvironment[SearchOptions]):
    """One question over a corpus.

    Wrong tools, wrong arguments and unknown ids are observations, not failures.

    Example: asked ``who is the mayor of the home of ada oak?``, ``search {"query": "ada oak"}`` lists ``k31 ada oak``,
    ``read {"document_id": "k31"}`` tells of ``silver ferry``, its document in turn of ``hugo elm``; that scores 1.0.
    """

    def prepare(self) -> None:
        """Find the corpus, and the answer."""
        self._problem = problem_of(self.options, self.task)
        self._corpus = corpus_of(self.options, self.task)
        self._num_searches = 0
        self._read_titles: set[str] = set()

    def prompt(self) -> Sequence[Message]:
        """What to do, and the question."""
        return (Message(Role.SYSTEM, INSTRUCTION), Message(Role.USER, self._problem.question))

    @tool
    def search(self, query: str, limit: Annotated[int, Field(ge=1, le=10)] = 3) -> str:
        """List documents that have words of the query, the best first: id and title of each."""
        self._num_searches += 1
        found = self._corpus.search(query, limit)
        return "\n".join(f"{document.id} {document.title}" for document in found) or "nothing found"

    @tool
    def read(self, document_id: str) -> str:
        """Read one document."""
        document = self._corpus.read(document_id)
        if document is None:
            raise ToolError(f"no document '{document_id}'; search lists ids")
        self._read_titles.add(document.title)
        return document.text

    def reward(self) -> Score:
        """1.0 for the right answer, else 0.0; `path_read` is the share of the documents it needs that were read."""
        is_right = self.answer is not None and normalise(self.answer) == normalise(self._problem.answer)
        path = self._problem.path
        metrics = {
            "searches": float(self._num_searches),
            "documents_read": float(len(self._read_titles)),
            "path_read": len(self._read_titles.intersection(path)) / len(path),
        }
        return Score(float(is_right), metrics)


def normalise(text: str) -> str:
    """An answer without case, final stops, and more than one space between words."""
    return " ".join(text.casefold().split()).rstrip(" .")
