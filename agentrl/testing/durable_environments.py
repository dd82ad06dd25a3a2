"""Environments whose state outlives their worker: ``living``, ``snapshotting`` and ``enduring`` of this module.

Their sessions and effects are files in a folder, which stands for a server: it sees what really arrived, and
stays while workers, in this process or another, come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """A session as its server knows it: its name and what it answered, by step, signed with its voice.

    `token` is the fencing token of its newest holder; who began it holds it under 0.
    """

    name: str
    voice: str
    results: tuple[StepResult, ...] = ()
    token: int = 0

    def after(self, action: Message) -> SessionState:
        """The state with one more action answered: the session's voice and how many calls there were."""
        num_calls = sum(len(result.messages) for result in self.results)
        replies = tuple(
            Message(Role.TOOL, f"{self.voice} call {number}", tool_call_id=call.id)
            for number, call in enumerate(action.tool_calls, num_calls + 1)
        )
        return replace(self, results=(*self.results, StepResult(replies, is_done=not replies)))


class SessionServer:
    """Keeps sessions and a log of effects; a disconnected one can be reached by nobody.

    Example: after a step of two calls ``effects()`` ends with ``"session-1 e/0.0 e/0.1"``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, voice: str | None = None) -> SessionState:
        """A new session; without a voice of its own it signs answers with its name, so that they tell it from others.

        Example: ``begin("any")`` answers a first call with ``"any call 1"``, whichever session it is.
        """
        self._check_connected()
        name = self._take_name()
        self._write(session := SessionState(name, voice or name))
        self._add("begun", session.name)
        return session

    def find(self, name: str, token: int) -> SessionState:
        """A session that lives, for who holds it under this token or takes it over with it.

        Raises:
            LookupError: it is not there.
            PermissionError: it was taken over under a greater token.
        """
        self._check_connected()
        if name not in self.alive():
            raise LookupError(f"the server has no {name}")
        session = codec.from_json((self._folder / f"{name}.session").read_bytes(), SessionState)
        if token < session.token:
            raise PermissionError(f"{name} is held under token {session.token}, which is above {token}")
        if token > session.token:
            self._write(session := replace(session, token=token))
        return session

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

    def _take_name(self) -> str:
        """A name that no other process gets: its file is made by one of them alone."""
        number = len(self.begun()) + 1
        while True:
            try:
                (self._folder / f"session-{number}.name").touch(exist_ok=False)
            except FileExistsError:
                number += 1
            else:
                return f"session-{number}"

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

    voice: str | None = None

    @classmethod
    def reattached(cls, options: LastingOptions, task: Task, handle: str, token: int) -> LivingEnvironment:
        """The side of a worker that takes the session over."""
        return cls(options, handle, token)

    def __init__(self, options: LastingOptions, session: str | None = None, token: int = 0) -> None:
        self._server, self._token = SessionServer(options.folder), token
        self._session = (self._server.begin(self.voice) if session is None else self._server.find(session, token)).name
        self._is_detached = False

    async def start(self) -> Opening:
        """A question and one tool."""
        return _OPENING

    async def step(self, action: Message) -> StepResult:
        """The session's answer, which the server remembers."""
        session = self._server.act(self._find(), action)
        self._server.keep(session)
        return session.results[-1]

    async def score(self) -> Score:
        """1, with the number of steps that the session saw."""
        return Score(1.0, {"steps": float(len(self._find().results))})

    async def close(self) -> None:
        """End the session unless it was left alive, or is another's by now."""
        if not self._is_detached and self._session in self._server.alive():
            self._server.end(self._find().name)

    async def handle(self) -> str:
        """The session's name."""
        return self._session

    async def detach(self) -> None:
        """Leave the session alive."""
        self._is_detached = True

    async def outcome(self, step: int, effect_ids: Sequence[str]) -> StepResult | None:
        """What the session answered in that step, if it came to it."""
        results = self._find().results
        return results[step] if step < len(results) else None

    def _find(self) -> SessionState:
        return self._server.find(self._session, self._token)


class EnduringEnvironment(LivingEnvironment):
    """A session on the server that also gives its state away whole, and answers as every other one does."""

    voice = "any"

    @classmethod
    def restored(cls, options: LastingOptions, snapshot: bytes) -> EnduringEnvironment:
        """A new session that goes on where another one was."""
        environment = cls(options)
        environment._server.keep(replace(codec.from_json(snapshot, SessionState), name=environment._session, token=0))
        return environment

    async def snapshot(self) -> bytes:
        """The session's whole state."""
        return codec.to_json(self._find())


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
    reattach_fenced=LivingEnvironment.reattached,
)
snapshotting = EnvironmentDefinition(
    "snapshotting",
    "State that is given away as a snapshot.",
    _sample_task,
    lambda options, task: SnapshotEnvironment(options),
    LastingOptions,
    restore=lambda options, task, snapshot: SnapshotEnvironment(options, codec.from_json(snapshot, SessionState)),
)
enduring = EnvironmentDefinition(
    "enduring",
    "Sessions that outlive their worker, give their state away and can be played again.",
    _sample_task,
    lambda options, task: EnduringEnvironment(options),
    LastingOptions,
    is_deterministic=True,
    reattach=lambda options, task, handle: EnduringEnvironment(options, handle),
    restore=lambda options, task, snapshot: EnduringEnvironment.restored(options, snapshot),
)
