"""OpenEnv's own server, by an interpreter that has it: ``python serve.py ENVIRONMENT PORT SESSIONS``.

``echo`` has an action of its own: it says a word again and rewards its length; ``stop`` ends the episode, ``fail``
raises, ``hang`` never returns. ``async_echo`` is the same by coroutines. ``sums`` has MCP tools.
"""

from __future__ import annotations

import sys
import threading

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class EchoAction(Action):
    """Say a word."""

    word: str


class EchoObservation(Observation):
    """The word again."""

    word: str


class EchoEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **others):
        self._state = State(episode_id=episode_id)
        return EchoObservation(word=f"seed {seed}")

    def step(self, action, timeout_s=None, **others):
        self._state.step_count += 1
        if action.word == "fail":
            raise RuntimeError("the echo is broken")
        if action.word == "hang":
            threading.Event().wait()
        return EchoObservation(word=action.word, reward=float(len(action.word)), done=action.word == "stop")

    @property
    def state(self):
        return self._state


class AsyncEchoEnvironment(EchoEnvironment):
    """The same without a change of threads at each call."""

    async def reset_async(self, seed=None, episode_id=None, **others):
        return self.reset(seed, episode_id)

    async def step_async(self, action, timeout_s=None, **others):
        return self.step(action)


class SumsEnvironment(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("sums")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        @server.tool
        def divide(a: int, b: int) -> float:
            """Divide two numbers."""
            return a / b

        super().__init__(server)
        self._state = State()

    def reset(self, seed=None, episode_id=None, **others):
        self._state = State(episode_id=episode_id)
        return Observation(metadata={"status": "ready"})

    def _step_impl(self, action, timeout_s=None, **others):
        return Observation()

    @property
    def state(self):
        return self._state


KINDS = {
    "echo": (EchoEnvironment, EchoAction, EchoObservation),
    "async_echo": (AsyncEchoEnvironment, EchoAction, EchoObservation),
    "sums": (SumsEnvironment, CallToolAction, CallToolObservation),
}


def main() -> None:
    name, port, sessions = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    app = create_app(*KINDS[name], env_name=name, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
