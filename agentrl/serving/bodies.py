"""The native protocol by HTTP: bodies of requests, as the OpenAPI document shows them, and the calls that they make."""

from __future__ import annotations

from typing import Annotated
from uuid import uuid4

from pydantic import Base64Bytes, BaseModel, ConfigDict, Field

from agentrl.types.errors import Boundary
from agentrl.types.message import Message
from agentrl.types.task import Split, Task

Number = Annotated[int, Field(ge=0, lt=2**53)]


class Body(BaseModel):
    """What every call bears."""

    model_config = ConfigDict(extra="forbid")

    request_id: str = Field(default_factory=lambda: uuid4().hex, min_length=1, max_length=255)
    """A call that is sent again under the same id gets the first answer and does nothing."""


class SampleBody(Body):
    """Which tasks are wanted."""

    split: Split
    seed: Number = 0
    ordinals: list[Number] = Field(max_length=1000)


class OpenBody(Body):
    """What a new session plays, and under which fencing token it is held."""

    environment: str
    task: Task
    snapshot: Base64Bytes | None = None
    token: Number = 0


class SessionBody(Body):
    """A call by who holds the session under this token; a greater one than before takes it over."""

    token: Number = 0


class StepBody(SessionBody):
    """What the agent says."""

    action: Message


class OutcomeBody(SessionBody):
    """Which step is asked for: its number, from 0, and the ids of its calls."""

    step: Number
    effect_ids: list[str] = Field(default_factory=list)


class OpenedBody(BaseModel):
    """A new session's handle, and how many more the server takes."""

    session: str
    free: int


class SnapshotBody(BaseModel):
    """The environment's whole state, in base 64."""

    snapshot: str


class FailureBody(BaseModel):
    """Why a call has no result."""

    boundary: Boundary
    kind: str
    message: str
    trace: str = ""


class DetailBody(BaseModel):
    """Why a request was refused."""

    detail: str


class HealthBody(BaseModel):
    """How the server is, and in `problems` what is wrong.

    It is ``healthy``, ``degraded`` where a process or an environment fails, ``unhealthy`` where none works.
    """

    status: str
    problems: list[str]
    sessions: int
    free: int
    draining: bool
    environments: list[str]
