"""The environment server: sessions that outlive their clients, behind one port.

`session.py` is one session: a lock, a fencing token, the ids of the calls that it has had. `table.py` keeps those of
one process, opens them, and ends those that nobody uses. `native.py` answers calls by WebSocket and `app.py` by HTTP;
both hand them to `routing.py`, which finds the process that has a session. `worker.py` is such a process, `parent.py`
starts them behind one socket, and another one where one died. They count in memory that they share (`board.py`).

OpenEnv's protocol is there, too: `openenv_session.py` is its session, which can be reset, over ours, and
`openenv_named.py` finds one by its id. `openenv_socket.py` and `openenv_routes.py` bring them to clients by WebSocket
and HTTP, `openenv_rpc.py` its part of MCP.

The records that cross the wire are in `agentrl/envs/wire.py`, beside their client.
"""
