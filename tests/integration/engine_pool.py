"""The engines of a test session, by kind: started when first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
from engine_server import FIRST_VERSION, EngineServer, running_engine
from server_traits import EMBEDDED, SGLANG, ServerTraits

from tests.servers.process import ServerDiedError
from tests.servers.sglang import running_sglang

Models = Mapping[str, tuple[Path, Path]]
Starter = Callable[[str, Path, Path], AbstractContextManager[str]]
_EMBEDDED_AT_ONCE = 3
# Tiny models make short steps: as long ones are computed, these are in a thread.
EMBEDDED_OPTIONS = ("--max-running-requests", "6", "--prefill-tokens", "64", "--long-step-s", "0")


class EnginePool:
    """Runs engines of one server, at most `num_at_once` of them; asking for one more ends the others.

    `models` gives the folder that a kind of engine serves and one with other weights; kinds that are not in it
    serve the dense model.
    """

    def __init__(self, start: Starter, traits: ServerTraits, models: Models, logs: Path, num_at_once: int) -> None:
        self._start, self._traits = start, traits
        self._models, self._logs = models, logs
        self._num_at_once = num_at_once
        self._running: dict[str, EngineServer] = {}
        self._stack = ExitStack()

    def get(self, kind: str) -> EngineServer:
        """The engine of a kind. Raises AssertionError with the log if it does not start."""
        if kind not in self._running:
            if len(self._running) == self._num_at_once:
                self.close()
            model, other = self._models.get(kind, self._models["dense"])
            url = self._stack.enter_context(self._start(kind, model, self._logs / f"{kind}.log"))
            self._running[kind] = EngineServer(url, model, other, self._traits)
        return self._running[kind]

    @contextmanager
    def expendable(self, kind: str) -> Iterator[EngineServer]:
        """An engine of a kind that may die; others end for it where only one runs at once."""
        if self._num_at_once == 1:
            self.close()
        model, other = self._models.get(kind, self._models["dense"])
        with suppress(ServerDiedError), self._start(kind, model, self._logs / f"expendable-{kind}.log") as url:
            yield EngineServer(url, model, other, self._traits)

    @contextmanager
    def another(self, kind: str) -> Iterator[EngineServer]:
        """An engine of a kind beside those that run."""
        model, other = self._models.get(kind, self._models["dense"])
        with self._start(kind, model, self._logs / f"another-{kind}.log") as url:
            yield EngineServer(url, model, other, self._traits)

    def close(self) -> None:
        """End all engines. Raises AssertionError with the log if one has died."""
        self._running.clear()
        self._stack.close()


@contextmanager
def make_pool(choice: str, models: Models, logs: Path) -> Iterator[EnginePool]:
    """The pool for ``--engine-server``: ``embedded``, ``sglang``, or the base URL of a server of the dense model."""
    if choice == "embedded":
        pool = EnginePool(_start_embedded, EMBEDDED, models, logs, num_at_once=_EMBEDDED_AT_ONCE)
    elif choice == "sglang":
        pool = EnginePool(_start_sglang, SGLANG, models, logs, num_at_once=1)
    else:
        pool = EnginePool(lambda *_: _attach(choice, models["dense"][0]), SGLANG, models, logs, num_at_once=1)
    try:
        yield pool
    finally:
        pool.close()


def _start_embedded(kind: str, model: Path, log: Path) -> AbstractContextManager[str]:
    return running_engine(model, log, *EMBEDDED_OPTIONS)


def _start_sglang(kind: str, model: Path, log: Path) -> AbstractContextManager[str]:
    return running_sglang(kind, model, log, FIRST_VERSION)


@contextmanager
def _attach(url: str, model: Path) -> Iterator[str]:
    """A server that runs already, brought to the weights of a folder that it can read."""
    body = {"model_path": str(model), "weight_version": FIRST_VERSION}
    httpx.post(f"{url}/update_weights_from_disk", json=body, timeout=60.0).raise_for_status()
    yield url
