"""A server of environments that a run starts at a place: ``python -m agentrl.serving.placed FD``.

Its parent sends a `PlacedServer` as a line, and gets a `ServerReady`. It ends when the parent closes the connection.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable

from agentrl import codec
from agentrl.process.loop import run_async
from agentrl.process.ports import bind
from agentrl.serving.options import PlacedServer, ServerReady
from agentrl.types.errors import AgentRLError

_MOST_SPEC_BYTES = 1 << 24


async def _run(control: socket.socket) -> None:
    """Serve until the parent hangs up."""
    reader, writer = await asyncio.open_connection(sock=control, limit=_MOST_SPEC_BYTES)
    spec = codec.from_json(await reader.readline(), PlacedServer)

    def tell(said: ServerReady) -> None:
        writer.write(codec.to_json(said) + b"\n")

    try:
        await _serve(spec, reader, tell)
    except* ModuleNotFoundError as group:
        tell(ServerReady(error=f"no server can run there: {group.exceptions[0]}; pip install 'agentrl[serve]'"))
        await writer.drain()
    except* AgentRLError as group:
        tell(ServerReady(error=str(group.exceptions[0])))
        await writer.drain()


async def _serve(spec: PlacedServer, reader: asyncio.StreamReader, tell: Callable[[ServerReady], None]) -> None:
    """Raises AgentRLError; ModuleNotFoundError where the extra is not installed."""
    from agentrl.serving.parent import EnvironmentServer

    async def stop_with(server: EnvironmentServer) -> None:
        await reader.read()
        server.stop()

    with bind(spec.host, 0) as listener:
        server = EnvironmentServer(spec.options, listener)
        url = f"http://{spec.host}:{listener.getsockname()[1]}"
        hearing = asyncio.create_task(stop_with(server), name="parent")
        await server.run(lambda: tell(ServerReady(url)))
        await hearing


def main() -> None:
    """Entry of the process."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    run_async(_run(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
