"""What real agents asked (`tests/agents/capture.py`), read by the gateway as by the reader of their own tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dialect_programs import reply_of

from agentrl.gateway.chat import ChatDialect
from agentrl.gateway.messages import MessagesDialect
from agentrl.gateway.responses import ResponsesDialect
from agentrl.types.message import Message, Role, ToolCall
from tests.agents import dialects

FOLDER = Path(__file__).parents[2] / "agents/requests"
READERS = {dialect.path: dialect for dialect in (ChatDialect(), ResponsesDialect(), MessagesDialect())}
IN_VAIN = {
    "claude-code": ("thinking", "output_config", "context_management"),
    "claude-code-sub-agent": ("output_config",),
    "codex": ("reasoning",),
    "codex-sub-agent": ("reasoning",),
    "mini-swe-agent": (),
}


def recorded(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def behind_system(messages: list[Message]) -> list[Message]:
    """All but the system messages at the beginning, which the gateway makes one."""
    first = next(i for i, message in enumerate(messages) if message.role is not Role.SYSTEM)
    return messages[first:]


@pytest.mark.parametrize("name", sorted(IN_VAIN))
def test_what_agents_ask_is_read_whole(name):
    request = recorded(name)
    body = request["body"]
    read = READERS[request["path"]].read(json.dumps(body).encode())
    reader = dialects.ROUTES[request["path"]]
    assert behind_system(list(read.call.messages)) == behind_system(reader.messages(body))
    assert [message.role for message in read.call.messages[:2]] == [Role.SYSTEM, Role.USER]
    assert [tool.name for tool in read.call.tools] == dialects.names_of(body["tools"])
    assert (read.is_streamed, read.call.max_tokens) == (body.get("stream", False), body.get("max_tokens"))
    assert read.overrides == IN_VAIN[name]


def test_a_function_of_a_namespace_is_called_by_both_its_names():
    request = recorded("codex")
    dialect = READERS[request["path"]]
    read = dialect.read(json.dumps(request["body"]).encode())
    call = ToolCall("call-7", "multi_agent_v1.spawn_agent", {"message": "hi"})
    answer = dialect.answer(read, reply_of(Message(Role.ASSISTANT, "", (call,))), "7")
    (item,) = answer["output"]
    assert (item["namespace"], item["name"]) == ("multi_agent_v1", "spawn_agent")
    assert any(
        (sent["namespace"], sent["name"]) == ("multi_agent_v1", "spawn_agent")
        for sent in request["body"]["input"]
        if "namespace" in sent
    ), "the agent itself writes it otherwise"
