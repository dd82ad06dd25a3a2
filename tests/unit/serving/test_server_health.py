"""What a server says of itself is true, and what is too large does not come in."""

from __future__ import annotations

import pytest
from counting_host import TASK, Host, opened, table_of

from agentrl.envs.wire import Open
from agentrl.serving.board import Board, Number
from agentrl.serving.guard import Guard
from agentrl.serving.health import metrics_text, report_health
from agentrl.serving.options import SessionLimits
from agentrl.serving.parent import check_is_safe
from agentrl.serving.table import SessionTable
from agentrl.types.errors import ConfigError, EpisodeError


class BrokenHost(Host):
    """Makes no environment until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.is_broken = True

    def open(self, task, origin=None):
        if self.is_broken:
            raise RuntimeError("the database is gone")
        return super().open(task, origin)


async def test_a_server_whose_environment_cannot_be_made_again_and_again_says_so_until_it_can() -> None:
    table = table_of(host := BrokenHost())
    table.board.beat()
    for number in range(3):
        assert report_health(table).status == "healthy"
        with pytest.raises(EpisodeError, match="the database is gone"):
            await table.answer(Open(id=str(number), environment="counting", task=TASK))
    report = report_health(table)
    assert report.status == "unhealthy", "it has no other environment"
    assert "counting cannot be made: environment(create): RuntimeError: the database is gone" in report.problems[0]
    host.is_broken = False
    await opened(table)
    assert (report_health(table).status, report_health(table).sessions) == ("healthy", 1)


def test_a_process_that_does_not_answer_is_named() -> None:
    board = Board(2)
    table = SessionTable({"counting": Host()}, SessionLimits(), board)
    assert report_health(table).status == "unhealthy"
    board.beat()
    assert (report_health(table).status, report_health(table).problems) == ("degraded", ["process 1 does not answer"])
    other = Board(2, 1, board.descriptor)
    other.beat()
    assert report_health(table).status == "healthy"
    other.bury(1)
    assert report_health(table).problems == ["process 1 does not answer"]


async def test_sessions_of_a_dead_process_are_counted_as_lost_and_leave_room() -> None:
    board = Board(2)
    table = SessionTable({"counting": Host()}, SessionLimits(most=3), board)
    Board(2, 1, board.descriptor).add(Number.SESSIONS, 2)
    await opened(table)
    assert table.free == 0
    board.bury(1)
    assert table.free == 2
    page = metrics_text(table).decode()
    assert 'agentrl_env_sessions{worker="0"} 1.0\nagentrl_env_sessions{worker="1"} 0.0' in page
    assert "agentrl_env_lost_total 2.0" in page
    assert "agentrl_env_restarts_total 1.0" in page


async def test_a_body_that_turns_out_too_large_is_cut_off() -> None:
    seen, pieces = [], [b"x" * 6, b"x" * 6, b""]

    async def application(scope, receive, send) -> None:
        while (event := await receive())["type"] == "http.request" and event["more_body"]:
            seen.append(event["body"])
        seen.append(event["type"])

    async def receive():
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(piece)}

    scope = {"type": "http", "path": "/sessions", "headers": []}
    await Guard(application, None, 10)(scope, receive, None)
    assert seen == [b"x" * 6, "http.disconnect"]


@pytest.mark.parametrize(
    ("host", "token", "is_safe"),
    [("127.0.0.1", None, True), ("::1", None, True), ("localhost", None, True), ("0.0.0.0", "secret", True)]
    + [(host, None, False) for host in ("0.0.0.0", "::", "10.0.0.5", "example.org")],
)
def test_only_this_machine_may_come_in_without_a_token(host: str, token: str | None, is_safe: bool) -> None:
    if is_safe:
        check_is_safe(host, token)
    else:
        with pytest.raises(ConfigError, match=f"--host {host} is reached by others.*give a --token-file"):
            check_is_safe(host, token)
