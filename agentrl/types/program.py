"""What a black-box program asks of a policy, and what it gets: the same records for every dialect of the gateway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from agentrl.types.generation import FinishReason
from agentrl.types.message import Message, ToolSpec


@dataclass(frozen=True, slots=True)
class GatewayAccess:
    """How a program reaches the policies of its episode: `url` is the gateway's root, `key` names the session.

    `socket` is a unix socket of the machine at which the same gateway listens, for programs in sandboxes.

    Example: ``GatewayAccess("http://127.0.0.1:8371", "ep-3f2a", "/tmp/gateway/socket")`` is used with the OpenAI SDK as
    ``OpenAI(base_url="http://127.0.0.1:8371/v1", api_key="ep-3f2a")``, and by path as
    ``http://127.0.0.1:8371/sessions/ep-3f2a/v1``.
    """

    url: str
    key: str
    socket: str


@dataclass(frozen=True, slots=True, eq=False)
class ModelCall:
    """One call of a program: a whole conversation as messages, or a prompt as token ids.

    `model` is the name that the program gave; an agent of that name replies, else the first. `max_tokens` is the
    program's own bound, None without one. Of `prompt_ids` and `messages` one is given. `wants_pieces` asks for the text
    of each token.

    Example: ``ModelCall("main", (Message(Role.USER, "hi"),))``.
    """

    model: str
    messages: tuple[Message, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    max_tokens: int | None = None
    prompt_ids: np.ndarray | None = None  # [P] int32
    wants_pieces: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ModelReply:
    """What a policy replied to a call of a program.

    `prompt_tokens` is the length of what the reply continues, `cached_tokens` how much of it an engine had in its
    cache. `pieces` are the texts of the tokens, one by one, where the call wants them.

    Example: a reply ``93`` of two tokens, its stop token included: ``pieces ("93", "")``, ``finish STOP``.
    """

    message: Message
    finish: FinishReason
    prompt_tokens: int
    token_ids: np.ndarray  # [n] int32, the stop token included
    logprobs: np.ndarray  # [n] float32, nats, of the distribution that the token was drawn from
    pieces: tuple[str, ...] = ()
    cached_tokens: int = 0


@runtime_checkable
class RunsPrograms(Protocol):
    """A scaffold that runs programs in the environment's sandbox, which call the policies through the gateway.

    That there are both is looked at before a run starts, instead of at every episode.
    """

    runs_programs: Literal[True]


@runtime_checkable
class RunsOwnProgram(RunsPrograms, Protocol):
    """A scaffold that has the environment run the program which the environment brings, without a sandbox of ours."""

    runs_own_program: Literal[True]


class CallRefusedError(Exception):
    """A call that cannot be answered as it is; the program is told so and its episode goes on.

    `status` is that of HTTP, `kind` the error's type in the dialect's own words, such as ``context_length_exceeded``,
    and `parameter` the part of the request that is at fault.
    """

    def __init__(self, message: str, *, status: int = 400, kind: str = "invalid_request_error", parameter: str = ""):
        super().__init__(message)
        self.status, self.kind, self.parameter = status, kind, parameter
