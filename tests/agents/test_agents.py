"""Each agent does a task in a sandbox without a network, asking a scripted policy behind a socket."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from fastapi.responses import JSONResponse

from agentrl.sandbox.client import KeeperHost
from agentrl.types.message import Message
from tests.agents import dialects
from tests.agents.cases import AGENTS, CLAUDE_CODE, CODEX, AgentCase
from tests.agents.playing import KEY, conversations, play
from tests.agents.policies import POLICIES, SHARING
from tests.agents.recorder import Recorded, recorded_agents

pytestmark = pytest.mark.timeout(600)
ALL = pytest.mark.parametrize("case", AGENTS, ids=lambda case: case.name)
WITH_SUB_AGENTS = pytest.mark.parametrize("case", [CODEX, CLAUDE_CODE], ids=lambda case: case.name)
# What an agent asks before it has done anything; less would mean that it does not run as its users run it.
LEAST_PROMPT_BYTES = {"mini-swe-agent": 3_000, "codex": 30_000, "claude-code": 50_000}
TEXT = "93 apples,\tcafé"


def essence(message: Message) -> object:
    """What must come back of a reply."""
    return message.content, [(call.id, call.name, call.arguments) for call in message.tool_calls]


def assert_goes_on(calls: Sequence[tuple[Recorded, Message]]) -> None:
    """Each call has the conversation before it, then our reply as we gave it, then something new."""
    for (before, reply), (after, _) in itertools.pairwise(calls):
        dialect = dialects.ROUTES[before.path]
        earlier, later = dialect.messages(before.body or {}), dialect.messages(after.body or {})
        assert later[: len(earlier)] == earlier
        assert essence(later[len(earlier)]) == essence(reply)
        assert len(later) > len(earlier) + 1


@ALL
async def test_an_agent_does_its_task_asking_its_policy_alone_and_sends_back_what_it_got(
    case: AgentCase, host: KeeperHost, socket: Path
) -> None:
    async with recorded_agents(socket, POLICIES[case.name]) as recorder:
        played = await play(host, socket, case, [(TEXT, "a.txt")])
    assert played.result.exit_code == 0, played.result.text
    assert played.files == {"a.txt": TEXT.encode()}
    assert case.name == "mini-swe-agent" or played.answer == "Written: a.txt."
    route = next(path for path, dialect in dialects.ROUTES.items() if dialect.name == case.dialect)
    assert {(request.method, request.path) for request in recorder.requests} - {("HEAD", "/")} == {("POST", route)}
    assert {(call.key, call.body["model"]) for call in recorder.calls() if call.body} == {(KEY, "main")}
    assert recorder.calls()[0].size_bytes > LEAST_PROMPT_BYTES[case.name]
    (calls,) = conversations(recorder).values()
    assert len(calls) == 4
    assert_goes_on(calls)


@WITH_SUB_AGENTS
async def test_sub_agents_have_conversations_of_their_own_at_once(
    case: AgentCase, host: KeeperHost, socket: Path
) -> None:
    async with recorded_agents(socket, POLICIES[case.name]) as recorder:
        played = await play(host, socket, case, [("one", "a.txt"), ("two", "b.txt")])
    assert played.result.exit_code == 0, played.result.text
    assert played.files == {"a.txt": b"one", "b.txt": b"two"}
    found = conversations(recorder)
    assert len(found) == 3
    for calls in found.values():
        assert_goes_on(calls)
    parts = [calls for calls in found.values() if calls[0][1].content != SHARING]
    assert [len(calls) for calls in parts] == [4, 4]


@ALL
async def test_an_agent_whose_session_is_over_ends_by_itself(case: AgentCase, host: KeeperHost, socket: Path) -> None:
    async with recorded_agents(socket, POLICIES[case.name]) as recorder:
        error = {"type": "permission_error", "message": "this session is over", "code": "session_over"}
        recorder.fault = lambda request, earlier: (
            JSONResponse({"type": "error", "error": error}, 403, {"x-should-retry": "false"}) if earlier else None
        )
        played = await play(host, socket, case, [(TEXT, "a.txt")])
    assert played.result.exit_code != 0
    assert "a.txt" not in played.files
    assert "this session is over" in played.result.text
