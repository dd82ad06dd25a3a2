from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.testing.tiny import tiny_chat
from agentrl.tokens.chat import ChatFormat


@pytest.fixture(scope="session")
def chat(tiny_model: Path) -> ChatFormat:
    return tiny_chat(tiny_model)
