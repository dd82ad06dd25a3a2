"""Batches are built on the event loop here: `attempt` tells by some turns of the loop whether a call waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest


async def _at_once(function: Callable, *arguments):
    return function(*arguments)


@pytest.fixture(autouse=True)
def builds_at_once(monkeypatch) -> None:
    monkeypatch.setattr("agentrl.buffer.episode_buffer.asyncio.to_thread", _at_once)
