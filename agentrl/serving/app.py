"""The server as an application: the native protocol by WebSocket and HTTP, health and metrics."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any
from zlib import crc32

from fastapi import FastAPI, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.routing import WebSocketRoute

import agentrl
from agentrl import codec
from agentrl.envs import wire
from agentrl.serving.bodies import (
    DetailBody,
    FailureBody,
    HealthBody,
    OpenBody,
    OpenedBody,
    OutcomeBody,
    SampleBody,
    SessionBody,
    SnapshotBody,
    StepBody,
)
from agentrl.serving.guard import Guard
from agentrl.serving.health import metrics_text, report_health
from agentrl.serving.native import Answering, NativeEndpoint
from agentrl.serving.openenv_routes import openenv_router
from agentrl.serving.openenv_session import INVALID
from agentrl.serving.options import ServerOptions
from agentrl.serving.table import SessionTable
from agentrl.types.environment import EnvironmentDescription, Opening, Score, StepResult
from agentrl.types.errors import Boundary, EpisodeError, boundary
from agentrl.types.task import Task

_STATUS = {"unknown": 404, "lost": 404, "fenced": 409, "repeated": 409, "outcome": 409, "protocol": 422, "busy": 503}
_ENVIRONMENT_FAILED, _TIMED_OUT = 424, 504
_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": DetailBody, "description": "The body is not JSON."},
    401: {"model": DetailBody, "description": "The bearer token is missing or wrong."},
    404: {"model": FailureBody, "description": "There is no such environment, or the session is gone."},
    409: {"model": FailureBody, "description": "Another holds the session, or the call is not its last."},
    413: {"model": DetailBody, "description": "The body is too large."},
    424: {"model": FailureBody, "description": "The environment failed."},
    503: {"model": FailureBody, "description": "There is no room; Retry-After says when to ask again."},
    504: {"model": FailureBody, "description": "The environment was too slow; the session has ended."},
}
PlainCall = wire.Attach | wire.Start | wire.GiveScore | wire.Close
_PLAIN_CALLS: tuple[tuple[str, type[PlainCall], Any], ...] = (
    ("attach", wire.Attach, None),
    ("start", wire.Start, Opening),
    ("score", wire.GiveScore, Score),
    ("close", wire.Close, None),
)
Handle = Annotated[str, Path(max_length=255)]
Name = Annotated[str, Path(max_length=255)]


def build_app(table: SessionTable, calls: Answering, options: ServerOptions) -> FastAPI:
    """All of a server's routes, over the sessions of one process; `calls` reaches those of the others too."""
    app = FastAPI(
        title="agentrl environment server",
        version=agentrl.__version__,
        description="Environments as sessions that outlive their clients; see GET /environments.",
    )
    app.add_middleware(Guard, token=options.token, max_message_bytes=options.max_message_bytes)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(EpisodeError, _failed)
    app.router.routes.append(WebSocketRoute(wire.CONNECT_PATH, NativeEndpoint(table, calls, options.max_message_bytes)))
    _add_state_routes(app, table)
    _add_environment_routes(app, table, calls)
    _add_session_routes(app, table, calls)
    for place, name in enumerate(table.hosts):
        router = openenv_router(table, calls, name)
        app.include_router(router, prefix=f"/openenv/{name}")
        if place == 0:  # OpenEnv's servers have one environment, without a prefix
            app.include_router(router)
    return app


def _add_state_routes(app: FastAPI, table: SessionTable) -> None:
    @app.get("/health", responses={200: {"model": HealthBody}, 503: {"model": HealthBody}}, tags=["server"])
    async def health() -> Response:
        """How the server is; 503 where it would take no session because it stops or nothing works."""
        report = report_health(table)
        status = 503 if report.status == "unhealthy" or report.draining else 200
        return Response(report.model_dump_json(), status, media_type="application/json")

    @app.get("/metrics", responses={200: {"content": {"text/plain": {}}}}, tags=["server"])
    async def metrics() -> Response:
        """What the whole server counts, for Prometheus."""
        return Response(metrics_text(table), media_type="text/plain; version=0.0.4")


def _add_environment_routes(app: FastAPI, table: SessionTable, calls: Answering) -> None:
    @app.get("/environments", responses={200: {"model": list[EnvironmentDescription]}}, tags=["environments"])
    async def environments() -> Response:
        """What there is to play."""
        return _json([host.description for host in table.hosts.values()])

    @app.post("/environments/{name}/tasks", responses={200: {"model": list[Task]}, **_REFUSALS}, tags=["environments"])
    async def sample(name: Name, body: SampleBody) -> Response:
        """Tasks of a split, by ordinal."""
        return _json(
            await calls.answer(
                wire.Sample(
                    id=body.request_id,
                    environment=name,
                    split=body.split,
                    seed=body.seed,
                    ordinals=tuple(body.ordinals),
                )
            )
        )


def _add_session_routes(app: FastAPI, table: SessionTable, calls: Answering) -> None:
    def add(path: str, endpoint: Callable[..., Awaitable[Response]], model: Any) -> None:
        app.add_api_route(
            f"/sessions/{{handle}}/{path}",
            endpoint,
            methods=["POST"],
            name=path,
            responses={200: {"model": model}, **_REFUSALS},
            tags=["sessions"],
        )

    @app.post("/sessions", status_code=201, responses={201: {"model": OpenedBody}, **_REFUSALS}, tags=["sessions"])
    async def open_session(body: OpenBody) -> Response:
        """A new session, which lives until it is closed, or is idle or old for too long."""
        call = wire.Open(
            id=body.request_id,
            environment=body.environment,
            task=body.task,
            snapshot=body.snapshot,
            token=body.token,
            worker=crc32(body.request_id.encode()) % table.board.num_workers,
        )
        return _json(await calls.answer(call), 201)

    async def step(handle: Handle, body: StepBody) -> Response:
        """The environment's reaction to an assistant message."""
        call = wire.Step(id=body.request_id, session=handle, token=body.token, action=body.action)
        return _json(await calls.answer(call))

    async def outcome(handle: Handle, body: OutcomeBody) -> Response:
        """What the session's last step gave; null if it never arrived."""
        ids = tuple(body.effect_ids)
        call = wire.Outcome(id=body.request_id, session=handle, token=body.token, step=body.step, effect_ids=ids)
        return _json(await calls.answer(call))

    async def snapshot(handle: Handle, body: SessionBody) -> Response:
        """The environment's whole state."""
        state = await calls.answer(wire.Snapshot(id=body.request_id, session=handle, token=body.token))
        return _json({"snapshot": state})

    for path, kind, model in _PLAIN_CALLS:
        add(path, _plain(calls, kind), model)
    add("step", step, StepResult)
    add("outcome", outcome, StepResult | None)
    add("snapshot", snapshot, SnapshotBody)


def _plain(calls: Answering, kind: type[PlainCall]) -> Callable[..., Awaitable[Response]]:
    """The endpoint of a call that says nothing but for which session it is."""

    async def endpoint(handle: Handle, body: SessionBody) -> Response:
        return _json(await calls.answer(kind(id=body.request_id, session=handle, token=body.token)))

    endpoint.__doc__ = kind.__doc__
    return endpoint


def _json(value: object, status: int = 200) -> Response:
    with boundary(Boundary.ENVIRONMENT, "answer", "its answer cannot be sent"):
        return Response(codec.to_json(value), status, media_type="application/json")


async def _failed(request: Request, error: Exception) -> Response:
    """A failure as a response."""
    assert isinstance(error, EpisodeError)
    failure = error.failure
    if failure.kind == INVALID:
        problem = {"type": "value_error", "loc": ["action"], "msg": failure.message}
        return Response(json.dumps({"detail": [problem]}), 422, media_type="application/json")
    default = _TIMED_OUT if failure.boundary is Boundary.TIMEOUT else _ENVIRONMENT_FAILED
    headers = {"retry-after": f"{error.retry_after_s:.0f}"} if isinstance(error, wire.ServerBusyError) else {}
    body = json.dumps(
        {"boundary": failure.boundary, "kind": failure.kind, "message": failure.message, "trace": failure.trace}
    )
    return Response(body, _STATUS.get(failure.kind, default), headers, "application/json")


async def _invalid(request: Request, error: Exception) -> Response:
    """What is wrong with a request, without what it was: that need not be text that can be sent back."""
    assert isinstance(error, RequestValidationError)
    problems: Sequence[Any] = error.errors()
    detail = [{name: problem[name] for name in ("loc", "msg", "type")} for problem in problems]
    return Response(json.dumps({"detail": detail}), 422, media_type="application/json")
