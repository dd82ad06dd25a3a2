"""Environments whose state outlives their worker, ``agentrl.testing.lasting:living`` and ``:snapshotting``.

Their sessions and effects are files in a folder, which stands for a server: it sees what really arrived, and
stays while workers, in this process or another, come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl import codec
from agentrl.config.base import ConfigModel
from agentrl.envs.definition import EnvironmentDefinition
from agentrl.types.environment import Opening, Score, StepResult
from agentrl.types.message import Message, Role, ToolSpec
from agentrl.types.task import Split, Task

_OPENING = Opening((Message(Role.USER, "count"),), (ToolSpec("query", "Query."),))


@dataclass(frozen=True, slots=True)
class SessionState:
    """A session as its server knows it: its name and what it answered, by step. Answers differ between sessions."""

    name: str
    results: tuple[StepResult, ...] = ()

    def after(self, action: Message) -> SessionState:
        """The state with one more action answered: the session's name and how many calls there were."""
        num_calls = sum(len(result.messages) for result in self.results)
        replies = tuple(
            Message(Role.TOOL, f"{self.name} call {number}", tool_call_id=call.id)
            for number, call in enumerate(action.tool_calls, num_calls + 1)
        )
        return SessionState(self.name, (*self.results, StepResult(replies, is_done=not replies)))


class SessionServer:
    """Keeps sessions and a log of effects; a disconnected one can be reached by nobody.

    Example: after a step of two calls ``effects()`` ends with ``"session-1 e/0.0 e/0.1"``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self) -> SessionState:
        """A new session."""
        self._check_connected()
        self._write(session := SessionState(f"session-{len(self.begun()) + 1}"))
        self._add("begun", session.name)
        return session

    def find(self, name: str) -> SessionState:
        """A session that lives. Raises LookupError."""
        self._check_connected()
        if name not in self.alive():
            raise LookupError(f"the server has no {name}")
        return codec.from_json((self._folder / f"{name}.session").read_bytes(), SessionState)

    def act(self, session: SessionState, action: Message) -> SessionState:
        """Carry an action out."""
        self._check_connected()
        self._add("effects", " ".join([session.name, *(call.id for call in action.tool_calls)]))
        return session.after(action)

    def keep(self, session: SessionState) -> None:
        """Remember a session as it is."""
        self._write(session)

    def end(self, name: str) -> None:
        """End a session; safe to call twice."""
        self._check_connected()
        (self._folder / f"{name}.session").unlink(missing_ok=True)

    def alive(self) -> list[str]:
        """Names of the sessions that live."""
        return sorted(path.stem for path in self._folder.glob("*.session"))

    def begun(self) -> list[str]:
        """Names of all sessions that ever were."""
        return self._lines("begun")

    def effects(self) -> list[str]:
        """What was carried out, a line a step: session and effect ids."""
        return self._lines("effects")

    def disconnect(self) -> None:
        """From here on no call arrives, as when the worker that makes them is dead."""
        (self._folder / "disconnected").touch()

    def connect(self) -> None:
        """Calls arrive again."""
        (self._folder / "disconnected").unlink(missing_ok=True)

    def _check_connected(self) -> None:
        if (self._folder / "disconnected").exists():
            raise ConnectionError("the server cannot be reached")

    def _lines(self, name: str) -> list[str]:
        path = self._folder / name
        return path.read_text().splitlines() if path.exists() else []

    def _add(self, name: str, line: str) -> None:
        with (self._folder / name).open("a") as file:
            file.write(line + "\n")

    def _write(self, session: SessionState) -> None:
        (self._folder / f"{session.name}.session").write_bytes(codec.to_json(session))


class LastingOptions(ConfigModel):
    """Which server an environment talks to."""

    folder: Path
    """Where the server keeps its files."""


class LivingEnvironment:
    """One side of a session on the server: counts calls, ends with the first reply that calls nothing."""

    def __init__(self, options: LastingOptions, session: str | None = None) -> None:
        self._server = SessionServer(options.folder)
        self._session = (self._server.begin() if session is None else self._server.find(session)).name
        self._is_detached = False

    async def start(self) -> Opening:
        """A question and one tool."""
        return _OPENING

    async def step(self, action: Message) -> StepResult:
        """The session's answer, which the server remembers."""
        session = self._server.act(self._server.find(self._session), action)
        self._server.keep(session)
        return session.results[-1]

    async def score(self) -> Score:
        """1, with the number of steps that the session saw."""
        return Score(1.0, {"steps": float(len(self._server.find(self._session).results))})

    async def close(self) -> None:
        """End the session unless it was left alive."""
        if not self._is_detached:
            self._server.end(self._session)

    async def handle(self) -> str:
        """The session's name."""
        return self._session

    async def detach(self) -> None:
        """Leave the session alive."""
        self._is_detached = True

    async def outcome(self, step: int, effect_ids: Sequence[str]) -> StepResult | None:
        """What the session answered in that step, if it came to it."""
        results = self._server.find(self._session).results
        return results[step] if step < len(results) else None


class SnapshotEnvironment:
    """Keeps its state in itself, and gives it away whole; the server only logs what it does."""

    def __init__(self, options: LastingOptions, state: SessionState | None = None) -> None:
        self._server = SessionServer(options.folder)
        self._state = state or self._server.begin()
        self._server.end(self._state.name)

    async def start(self) -> Opening:
        """A question and one tool."""
        return _OPENING

    async def step(self, action: Message) -> StepResult:
        """The answer, by the state of this instance."""
        self._state = self._server.act(self._state, action)
        return self._state.results[-1]

    async def score(self) -> Score:
        """1, with the number of steps that this state has seen."""
        return Score(1.0, {"steps": float(len(self._state.results))})

    async def close(self) -> None:
        """The state goes with the instance."""

    async def snapshot(self) -> bytes:
        """The whole state."""
        return codec.to_json(self._state)


def _sample_task(options: LastingOptions, split: Split, ordinal: int, seed: int) -> Task:
    return Task("lasting", split, ordinal, {"seed": seed})


living = EnvironmentDefinition(
    "living",
    "Sessions that outlive their worker.",
    _sample_task,
    lambda options, task: LivingEnvironment(options),
    LastingOptions,
    reattach=lambda options, task, handle: LivingEnvironment(options, handle),
)
snapshotting = EnvironmentDefinition(
    "snapshotting",
    "State that is given away as a snapshot.",
    _sample_task,
    lambda options, task: SnapshotEnvironment(options),
    LastingOptions,
    restore=lambda options, task, snapshot: SnapshotEnvironment(options, codec.from_json(snapshot, SessionState)),
)
