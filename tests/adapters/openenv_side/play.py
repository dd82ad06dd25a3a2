"""OpenEnv's own clients, by an interpreter that has them: ``python play.py generic|mcp URL``.

Reads calls, a JSON array a line: ``["reset", {...}]``, ``["step", {...}]`` and ``["state"]``; of the client of MCP
tools ``["tools"]`` and ``["call", NAME, {...}]``. Answers each with a line of JSON, what the client gave or raised. The
end of its input is the end of its session.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress

from openenv.core.generic_client import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient

CLIENTS = {"generic": GenericEnvClient, "mcp": MCPToolClient}


async def answer(client, call):
    name, *arguments = call
    if name == "state":
        return {"state": await client.state()}
    if name == "tools":
        return {"tools": [tool.name for tool in await client.list_tools()]}
    if name == "call":
        return {"result": await client.call_tool(arguments[0], **arguments[1])}
    result = await (client.reset(**arguments[0]) if name == "reset" else client.step(arguments[0]))
    observation = result.observation if isinstance(result.observation, dict) else result.observation.model_dump()
    return {"observation": observation, "reward": result.reward, "done": result.done}


async def main() -> None:
    client = CLIENTS[sys.argv[1]](base_url=sys.argv[2])
    for line in sys.stdin:
        try:
            said = await answer(client, json.loads(line))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what the client's user sees
            said = {"raised": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)
    with suppress(Exception):
        await client.close()


if __name__ == "__main__":
    asyncio.run(main())
