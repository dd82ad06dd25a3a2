"""A server of MCP's own package: python mcp_server.py stdio|PORT. Sums, notes of a session, and what may go wrong."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import defaultdict

from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("sums")
notes: dict[str | None, list[str]] = defaultdict(list)


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def divide(a: float, b: float) -> float:
    """Divide one number by another."""
    return a / b


@server.tool()
def note(text: str, context: Context) -> str:
    """Keep a note, and read all notes of this session."""
    kept = notes[(context.headers or {}).get("mcp-session-id")]
    kept.append(text)
    return ", ".join(kept)


@server.tool()
def secret() -> str:
    """What the environment variable SUMS_SECRET has, and the variable SUMS_OTHER."""
    return f"{os.environ.get('SUMS_SECRET')} {os.environ.get('SUMS_OTHER')}"


@server.tool()
async def hang() -> str:
    """Answer in an hour."""
    await asyncio.sleep(3600)
    return "late"


@server.tool()
def end() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run()
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
