"""One session with an MCP server: connected, its tools called, ended, each with a deadline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from agentrl.types.errors import Boundary, EpisodeError
from agentrl.types.message import ToolSpec
from agentrl_environments.mcp.options import MCP, McpOptions, value_of

_INVALID_PARAMS = -32602  # JSON-RPC: the call itself is at fault, not the server
_END_S = 10.0  # a program that does not leave is killed by the package within 6


class McpSession:
    """A session for one episode. What the server itself cannot do is an EpisodeError, and the session is over then.

    The package's connections must be left by the task that made them, while an episode's calls may come from any: so
    a task of its own holds the connection.

    Example::

        session = McpSession(options)
        tools = await session.open()
        text = await session.call("add", {"a": 1, "b": 2})
        await session.close()
    """

    def __init__(self, options: McpOptions) -> None:
        self._options = options
        self._mcp: Any = MCP.load("mcp", options)
        self._leaving = asyncio.Event()
        self._is_connected = False
        self._holder: asyncio.Task[None] | None = None
        self._client: Any = None
        self._ended = "it was never begun"

    async def open(self) -> tuple[ToolSpec, ...]:
        """Connect, and list the tools.

        Waits for: the server. Unblocked by: its list, its end, or `connect_s`. Raises EpisodeError.
        """
        connected: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(connected), name="mcp-session")
        try:
            async with asyncio.timeout(self._options.connect_s):
                self._client = await connected
                return await self._tools()
        except TimeoutError:
            message = f"{self._options.server} has not listed its tools within {self._options.connect_s:g} s"
            raise await self._given_up(Boundary.TIMEOUT, "environment.start", message) from None
        except self._mcp.MCPError as error:
            message = f"{self._options.server} lists no tools: {error.message}"
            raise await self._given_up(Boundary.ENVIRONMENT, "create", message) from error

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What a tool returned, as text; an error of the tool begins with ``error: ``.

        Waits for: the server. Unblocked by: its answer, its end, or `call_s`. Raises EpisodeError.
        """
        if self._client is None:
            raise EpisodeError(Boundary.ENVIRONMENT, "lost", f"no session with {self._options.server}: {self._ended}")
        try:
            async with asyncio.timeout(self._options.call_s):
                return _text(await self._client.call_tool(name, dict(arguments)))
        except TimeoutError:
            message = f"{self._options.server} has not answered within {self._options.call_s:g} s"
            raise await self._given_up(Boundary.TIMEOUT, "environment.step", message) from None
        except self._mcp.MCPError as error:
            if error.code == _INVALID_PARAMS:
                return f"error: {error.message}"
            message = f"the session with {self._options.server} is gone: {error.message}"
            raise await self._given_up(Boundary.ENVIRONMENT, "lost", message) from error
        except (RuntimeError, ValueError) as error:  # a result that breaks the protocol, or the tool's own schema
            message = f"{self._options.server}: tool {name}: {error}"
            raise await self._given_up(Boundary.ENVIRONMENT, "protocol", message) from error

    async def close(self) -> None:
        """End the session, and the server's program with it.

        Waits for: the program's end. Unblocked by: that, or ten seconds; and as long again where it has to be cut off.
        """
        self._client = None
        self._leaving.set()
        if self._holder is None:
            return
        holder, self._holder = self._holder, None
        if self._is_connected:
            await asyncio.wait({holder}, timeout=_END_S)
        if not holder.done():
            holder.cancel()
            await asyncio.wait({holder}, timeout=_END_S)

    async def _given_up(self, boundary: Boundary, kind: str, message: str) -> EpisodeError:
        """The error, with the session ended behind it."""
        self._ended = message
        await self.close()
        return EpisodeError(boundary, kind, message)

    async def _hold(self, connected: asyncio.Future[Any]) -> None:
        try:
            # The older handshake gives every client a session, also by HTTP; the newer one has none.
            async with self._transport() as transport, self._client_of(transport) as client:
                self._is_connected = True
                if not connected.done():
                    connected.set_result(client)
                await self._leaving.wait()
        except Exception as error:  # noqa: BLE001 - connections end in groups of whatever their tasks raised
            message = f"no session with {self._options.server}: {_innermost(error)}"
            if not connected.done():
                connected.set_exception(EpisodeError(Boundary.ENVIRONMENT, "create", message))

    def _client_of(self, transport: Any) -> Any:
        return self._mcp.Client(transport, mode="legacy", cache=None)

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        options = self._options
        if options.url is None:
            variables = {name: value_of(name, options) for name in options.variables}
            command, *arguments = options.command
            yield self._mcp.StdioServerParameters(command=command, args=arguments, env=variables)
            return
        http = MCP.load("mcp.client.streamable_http", options)
        httpx = MCP.load("httpx2", options)
        headers = {}
        if options.token_variable is not None:
            headers["Authorization"] = f"Bearer {value_of(options.token_variable, options)}"
        waits = httpx.Timeout(options.connect_s, read=options.call_s + _END_S)
        async with httpx.AsyncClient(headers=headers, timeout=waits) as client:
            yield http.streamable_http_client(options.url, http_client=client)

    async def _tools(self) -> tuple[ToolSpec, ...]:
        found: list[ToolSpec] = []
        cursor = None
        while True:
            listed = await self._client.list_tools(cursor=cursor)
            found += (ToolSpec(each.name, each.description or "", each.input_schema) for each in listed.tools)
            cursor = listed.next_cursor
            if cursor is None:
                break
        if not found:
            message = f"{self._options.server} has no tools to call"
            raise await self._given_up(Boundary.ENVIRONMENT, "create", message)
        return tuple(found)


def _text(result: Any) -> str:
    """A result as a policy reads it: its texts, else its value as JSON; other content by its kind."""
    parts = [part.text if part.type == "text" else f"({part.type})" for part in result.content]
    shown = "\n".join(parts) if parts else json.dumps(result.structured_content, ensure_ascii=False)
    return f"error: {shown}" if result.is_error else shown


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
