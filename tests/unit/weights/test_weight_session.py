from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from agentrl.types.errors import EngineError, EngineRefusedError
from agentrl.weights.session import weight_update
from tests.unit.weights.recording_engine import RecordingEngine


class _Server(RecordingEngine):
    """Answers the calls around an update with the given HTTP status for the first one."""

    def __init__(self, first_status: int) -> None:
        super().__init__("a")
        self.statuses = [first_status]
        self.paths: list[tuple[str, Mapping[str, Any]]] = []

    async def control(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self.paths.append((path, body))
        if self.statuses and (status := self.statuses.pop()) != 200:
            raise EngineRefusedError(f"{path} is refused", status)
        return {}


async def test_a_server_that_knows_no_sessions_is_updated_without_one() -> None:
    server = _Server(404)
    async with weight_update(server):
        pass
    assert server.paths == [("/begin_weight_update", {})]


async def test_a_session_that_was_left_open_is_discarded_first() -> None:
    server = _Server(400)
    async with weight_update(server):
        pass
    begin, end = ("/begin_weight_update", {}), ("/end_weight_update", {})
    assert server.paths == [begin, ("/end_weight_update", {"discard": True}), begin, end]


@pytest.mark.parametrize(("status", "ends"), [(404, []), (200, [("/end_weight_update", {"discard": True})])])
async def test_an_update_that_fails_is_discarded(status: int, ends: list[Any]) -> None:
    server = _Server(status)
    with pytest.raises(EngineError, match="bucket 2 is lost"):
        async with weight_update(server):
            raise EngineError("bucket 2 is lost")
    assert server.paths[1:] == ends
