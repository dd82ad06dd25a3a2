from __future__ import annotations

import sys

import pytest

from agentrl.process.ports import free_port
from tests.servers.held_sessions import hold_sessions
from tests.servers.process import running_server

SESSIONS = 1000
START_S = 240.0


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
async def test_a_thousand_sessions_at_once_each_get_their_own_answers(tmp_path, workers):
    port = free_port()
    command = [sys.executable, "-m", "agentrl.cli.main", "env", "serve", "tests.servers.echo:echo", "--port", str(port)]
    command += ["--workers", str(workers), "--max-sessions", str(SESSIONS)]
    with running_server(command, port, tmp_path / "log", START_S):
        held = await hold_sessions(port, SESSIONS)
    assert (held.ended_well, held.crosstalk) == (SESSIONS, 0)
