"""OpenEnv's protocol as routes: those of its HTTP server, with its two WebSockets.

As there, a reset or a step without a session is carried out by an environment of the moment. With the ``session_id``
that ``openenv/session/create`` gave, it is carried out in that session.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Body, HTTPException, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.routing import WebSocketRoute

import agentrl
from agentrl.serving.native import Answering
from agentrl.serving.openenv_named import OpenEnvSessions
from agentrl.serving.openenv_rpc import answer_rpc
from agentrl.serving.openenv_session import ACTION_SCHEMA, SPLITS, Data, invalid
from agentrl.serving.openenv_socket import RpcEndpoint, StepEndpoint
from agentrl.serving.table import SessionTable

_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The body is not JSON, or there is no such task."},
    401: {"description": "The bearer token is missing or wrong."},
    404: {"description": "There is no such environment, or the session is gone."},
    413: {"description": "The body is too large."},
    424: {"description": "The environment failed."},
    501: {"description": "The tasks cannot be listed."},
    503: {"description": "There is no room; Retry-After says when to ask again."},
    504: {"description": "The environment was too slow; the session has ended."},
}
SessionId = Annotated[str | None, Query(max_length=255)]
_Index = Annotated[int, Field(ge=-(2**53), lt=2**53)]
_OBSERVATION_SCHEMA = {
    "title": "Observation",
    "type": "object",
    "properties": {
        "messages": {"type": "array", "items": {"type": "object"}},
        "tool_name": {"type": "string"},
        "result": {},
        "error": {},
        "tools": {"type": "array", "items": {"type": "object"}},
        "metadata": {"type": "object", "additionalProperties": True},
    },
}


class ResetBody(BaseModel):
    """Which task, as far as the client cares; other arguments are ignored."""

    model_config = ConfigDict(extra="allow")

    seed: int | None = Field(None, ge=0, lt=2**53)
    episode_id: str | None = Field(None, max_length=255)
    split: str = "train"
    index: int | None = Field(None, ge=0, lt=2**53)
    session_id: str | None = Field(None, max_length=255)


class StepBody(BaseModel):
    """An action of ``/schema``."""

    model_config = ConfigDict(extra="allow")

    action: dict[str, Any]
    timeout_s: float | None = Field(None, gt=0)
    request_id: str | None = Field(None, max_length=255)
    session_id: str | None = Field(None, max_length=255)


class ObservedBody(BaseModel):
    """What an action gave."""

    observation: dict[str, Any]
    reward: float | None = None
    done: bool = False
    metadata: dict[str, Any] | None = None


class StateBody(BaseModel):
    """Which episode a session plays."""

    episode_id: str | None = None
    step_count: int = 0


class SplitBody(BaseModel):
    """Which tasks."""

    split: str


class TaskBody(SplitBody):
    """Which task."""

    index: _Index


class TaskRangeBody(SplitBody):
    """Which tasks: from `start` on, and before `stop`."""

    start: _Index | None = None
    stop: _Index | None = None


def openenv_router(table: SessionTable, calls: Answering, environment: str) -> APIRouter:
    """OpenEnv's protocol for one environment of the server."""
    sessions = OpenEnvSessions(table, calls, environment)
    router = APIRouter(responses=_REFUSALS)
    router.routes.append(WebSocketRoute("/ws", StepEndpoint(sessions)))
    router.routes.append(WebSocketRoute("/mcp", RpcEndpoint(sessions)))
    _add_description(router, environment)
    _add_control(router, sessions)
    _add_tasks(router, table, environment)
    return router


def _add_description(router: APIRouter, environment: str) -> None:
    @router.get("/metadata", tags=["OpenEnv"])
    async def metadata() -> dict[str, Any]:
        """The environment's name."""
        return {
            "name": environment,
            "description": f"The environment '{environment}' of an agentrl server.",
            "readme_content": None,
            "version": agentrl.__version__,
            "author": None,
            "documentation_url": None,
        }

    @router.get("/schema", tags=["OpenEnv"])
    async def schema() -> dict[str, Any]:
        """JSON Schemas of actions, observations and states."""
        observed = _OBSERVATION_SCHEMA
        state = StateBody.model_json_schema()
        return {"action": ACTION_SCHEMA, "observation": observed, "reset_observation": observed, "state": state}


def _add_control(router: APIRouter, sessions: OpenEnvSessions) -> None:
    @router.post("/reset", response_model=ObservedBody, tags=["OpenEnv"])
    async def reset(body: Annotated[ResetBody, Body(default_factory=ResetBody)]) -> Data:
        """Begin a task."""
        arguments = _raw({name: value for name, value in body.model_dump().items() if value is not None})
        if body.session_id is not None:
            return await sessions.named(body.session_id).act("reset", arguments)
        fresh = sessions.new()
        try:
            return await fresh.act("reset", arguments)
        finally:
            await fresh.close()

    @router.post("/step", response_model=ObservedBody, tags=["OpenEnv"])
    async def step(body: StepBody) -> Data:
        """Carry out an action."""
        action = _raw(body.action)
        if body.session_id is not None:
            return await sessions.named(body.session_id).act("step", action)
        fresh = sessions.new()
        try:
            await fresh.act("reset")
            return await fresh.act("step", action)
        finally:
            await fresh.close()

    @router.get("/state", response_model=StateBody, tags=["OpenEnv"])
    async def state(session_id: SessionId = None) -> Data:
        """The state of a session; without one, that of an environment that nothing has happened in."""
        return {} if session_id is None else await sessions.named(session_id).act("state")

    @router.post("/mcp", tags=["OpenEnv"])
    async def mcp(request: Request) -> dict[str, Any]:
        """Tools and sessions by JSON-RPC 2.0; errors are in the response's ``error``."""
        return await answer_rpc(sessions, await request.body())


def _add_tasks(router: APIRouter, table: SessionTable, environment: str) -> None:
    """Which tasks there are, by name alone: what a task is made of may hold its answer."""

    def listed(split: str, places: Iterable[int]) -> list[Data]:
        return [{"id": f"{environment}/{SPLITS[split]}/{n}", "split": split, "index": n} for n in places]

    def size(name: str, split: str) -> int:
        known = table.hosts[environment].description.num_tasks
        _check(name, split)
        if known is None or split != "train":
            raise HTTPException(501, f"the {split} tasks of '{environment}' are endless; ask for them by index")
        return known

    def _check(name: str, split: str) -> None:
        if name.lower() != environment.lower():
            raise HTTPException(404, f"unknown environment {name!r}")
        if split not in SPLITS:
            raise HTTPException(400, f"unknown split {split!r}; there are {', '.join(SPLITS)}")

    @router.get("/list_environments", tags=["OpenEnv tasks"])
    async def list_environments() -> list[str]:
        """The environment's name."""
        return [environment]

    @router.get("/{name}/splits", tags=["OpenEnv tasks"])
    async def splits(name: Annotated[str, Path(max_length=255)]) -> list[dict[str, str]]:
        """Which halves its tasks have."""
        _check(name, "train")
        return [{"name": "train", "type": "train"}, {"name": "heldout", "type": "test"}]

    @router.post("/{name}/num_tasks", tags=["OpenEnv tasks"])
    async def num_tasks(name: Annotated[str, Path(max_length=255)], body: SplitBody) -> dict[str, int]:
        """How many there are."""
        return {"num_tasks": size(name, body.split)}

    @router.post("/{name}/tasks", tags=["OpenEnv tasks"])
    async def tasks(name: Annotated[str, Path(max_length=255)], body: SplitBody) -> dict[str, Any]:
        """All of them."""
        return {"tasks": listed(body.split, range(size(name, body.split))), "env_name": environment}

    @router.post("/{name}/task", tags=["OpenEnv tasks"])
    async def task(name: Annotated[str, Path(max_length=255)], body: TaskBody) -> dict[str, Any]:
        """One of them."""
        _check(name, body.split)
        most = table.hosts[environment].description.num_tasks if body.split == "train" else None
        if body.index < 0 or (most is not None and body.index >= most):
            raise HTTPException(400, "Invalid task index")
        return {"task": listed(body.split, [body.index])[0]}

    @router.post("/{name}/task_range", tags=["OpenEnv tasks"])
    async def task_range(name: Annotated[str, Path(max_length=255)], body: TaskRangeBody) -> dict[str, Any]:
        """Some of them; places behind the last are none."""
        places = range(size(name, body.split))[body.start : body.stop]
        return {"tasks": listed(body.split, places)}


def _raw(value: Data) -> bytes:
    """A value as JSON; texts and numbers that JSON readers do not take are an invalid action."""
    try:
        return msgspec.json.encode(value)
    except (UnicodeError, OverflowError, RecursionError) as error:
        raise invalid(f"it cannot be read: {error}") from error
