"""What programs send, read as messages, tools and names of what is asked for in vain."""

from __future__ import annotations

import pytest
from agent_requests import CLAUDE_CODE, CODEX, MINI_SWE_AGENT, MINI_SWE_AGENT_TOOLS
from dialect_programs import FUNCTION, QUESTION, read

from agentrl.gateway.chat import ChatDialect
from agentrl.gateway.messages import MessagesDialect
from agentrl.gateway.responses import ResponsesDialect
from agentrl.types.message import Message, Role, ToolCall, ToolSpec

CHAT = {"model": "main", "messages": QUESTION}
RESPONSES = {"model": "main", "input": "hi"}
MESSAGES = {"model": "main", "max_tokens": 9, "messages": QUESTION}
DIALECTS = [(ChatDialect(), CHAT), (ResponsesDialect(), RESPONSES), (MessagesDialect(), MESSAGES)]
QUERY = ToolSpec("query", "Run SQL.", FUNCTION["parameters"])
every_dialect = pytest.mark.parametrize(("dialect", "request_"), DIALECTS, ids=lambda value: getattr(value, "name", ""))


def test_codex():
    call = read(ResponsesDialect(), CODEX)
    assert call.call.messages == (
        Message(Role.SYSTEM, "You are a coding agent.\n\n<permissions>sandboxed</permissions>"),
        Message(Role.USER, "<environment_context>cwd</environment_context>"),
        Message(Role.USER, "Fix the bug."),
        Message(Role.ASSISTANT, "I look at it.", (ToolCall("call_1", "shell", {"command": ["ls", "-l"]}),)),
        Message(Role.TOOL, "total 0", tool_call_id="call_1"),
        Message(Role.ASSISTANT, "", (ToolCall("call_2", "shell", {}, "invalid_json", '{"command": '),)),
        Message(Role.TOOL, "failed to parse function arguments", tool_call_id="call_2"),
        Message(Role.ASSISTANT, "", (ToolCall("call_3", "multi_agent_v1.spawn_agent", {"message": "Look."}),)),
        Message(Role.TOOL, "{}", tool_call_id="call_3"),
    )
    assert [tool.name for tool in call.call.tools] == ["shell", "update_plan", "multi_agent_v1.spawn_agent"]
    assert call.call.tools[2].description == "Sub-agents.\n\nSpawns one."
    assert call.call.tools[0].parameters["required"] == ["command"]
    assert call.is_streamed
    assert sorted(call.overrides) == [
        "parallel_tool_calls",
        "reasoning",
        "text",
        "tools.custom",
        "tools.local_shell",
        "tools.web_search",
    ]


def test_claude_code():
    call = read(MessagesDialect(), CLAUDE_CODE)
    assert call.call.messages == (
        Message(Role.SYSTEM, "You are Claude Code.\n\nYou help with software."),
        Message(Role.USER, "<system-reminder>\nToday.\n</system-reminder>\nFix the bug."),
        Message(Role.ASSISTANT, "I look.", (ToolCall("call-0", "Bash", {"command": "ls"}), ToolCall("call-1", "Stop"))),
        Message(Role.TOOL, "a.py\nb.py", tool_call_id="call-0"),
        Message(Role.TOOL, "", tool_call_id="call-1"),
        Message(Role.USER, "<system-reminder>\nGo on.\n</system-reminder>"),
    )
    assert [tool.name for tool in call.call.tools] == ["Bash", "Stop"]
    assert call.call.max_tokens == 32000
    assert call.is_streamed
    assert call.overrides == (
        "temperature",
        "thinking",
        "output_config",
        "context_management",
        "tools.web_search_20250305",
    )


def test_claude_codes_accounting_does_not_change_the_conversation():
    def with_hash(value: str) -> dict:
        block = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.177; cch={value};"}
        return CLAUDE_CODE | {"system": [block, *CLAUDE_CODE["system"][1:]]}

    one, two = (read(MessagesDialect(), with_hash(value)).call for value in ("36ee5", "0aaa9"))
    assert one.messages == two.messages


def test_mini_swe_agent():
    call = read(ChatDialect(), MINI_SWE_AGENT)
    assert call.call.messages == (
        Message(Role.SYSTEM, "You can use bash."),
        Message(Role.USER, "Fix the bug."),
        Message(Role.ASSISTANT, "```mswea_bash_command\nls\n```"),
        Message(Role.USER, "<returncode>0</returncode>\n<output>\na.py</output>"),
    )
    assert (call.call.tools, call.overrides) == ((), ("temperature",))
    call = read(ChatDialect(), MINI_SWE_AGENT_TOOLS)
    assert call.call.messages[2:] == (
        Message(Role.ASSISTANT, "", (ToolCall("call-0", "bash", {"command": "ls"}),)),
        Message(Role.TOOL, "a.py", tool_call_id="call-0"),
    )
    assert [tool.name for tool in call.call.tools] == ["bash"]


@every_dialect
def test_leading_system_messages_become_one(dialect, request_):
    system = [{"role": "system", "content": "One."}, {"role": "system", "content": [{"type": "text", "text": "Two."}]}]
    later = [{"role": "user", "content": "hi"}, {"role": "system", "content": "Three."}]
    field = "input" if dialect.name == "responses" else "messages"
    assert read(dialect, request_ | {field: [*system, *later]}).call.messages == (
        Message(Role.SYSTEM, "One.\n\nTwo."),
        Message(Role.USER, "hi"),
        Message(Role.SYSTEM, "Three."),
    )


def test_the_developer_is_the_system():
    developer = {"role": "developer", "content": "Be brief."}
    expected = (Message(Role.SYSTEM, "Be brief."), Message(Role.USER, "hi"))
    assert read(ChatDialect(), CHAT | {"messages": [developer, *QUESTION]}).call.messages == expected
    assert read(ResponsesDialect(), RESPONSES | {"input": [developer, *QUESTION]}).call.messages == expected


def test_a_system_prompt_of_its_own_field_comes_first():
    expected = (Message(Role.SYSTEM, "Be brief."), Message(Role.USER, "hi"))
    assert read(ResponsesDialect(), RESPONSES | {"instructions": "Be brief."}).call.messages == expected
    assert read(MessagesDialect(), MESSAGES | {"system": "Be brief."}).call.messages == expected


def test_parts_of_a_text_are_joined_without_separator():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    for dialect, request in DIALECTS:
        field = "input" if dialect.name == "responses" else "messages"
        call = read(dialect, request | {field: [{"role": "user", "content": parts}]})
        assert call.call.messages == (Message(Role.USER, "ab"),)


def test_results_of_an_anthropic_message_stand_before_its_text():
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "1"}], "is_error": True}
    content = [{"type": "text", "text": "Now?"}, result, result | {"tool_use_id": "b", "content": "2"}]
    call = read(MessagesDialect(), MESSAGES | {"messages": [{"role": "user", "content": content}]})
    assert call.call.messages == (
        Message(Role.TOOL, "1", tool_call_id="a"),
        Message(Role.TOOL, "2", tool_call_id="b"),
        Message(Role.USER, "Now?"),
    )


def test_nulls_and_unknown_fields_are_no_errors():
    history = [*QUESTION, {"role": "assistant", "content": "Yes.", "tool_calls": None, "newest": {}}, *QUESTION]
    call = read(ChatDialect(), CHAT | {"messages": history, "tools": None, "stop": None, "n": 1, "newest_field": {}})
    assert call.call.messages[1] == Message(Role.ASSISTANT, "Yes.")
    assert call.overrides == ("unrecognized",)


@every_dialect
def test_fields_that_are_about_no_reply_are_not_named(dialect, request_):
    silent = {"metadata": {"user_id": "u"}, "service_tier": "a tier that no SDK knows yet"}
    assert read(dialect, request_ | silent).overrides == ()


@pytest.mark.parametrize(
    ("name", "given", "neutral"),
    [
        ("temperature", 0.2, None),
        ("top_p", 0.9, None),
        ("frequency_penalty", 0.5, 0),
        ("presence_penalty", 0.5, 0.0),
        ("logit_bias", {"5": 1}, {}),
        ("seed", 0, None),
        ("stop", ["\n"], []),
        ("response_format", {"type": "json_object"}, {"type": "text"}),
        ("tool_choice", "required", "auto"),
        ("parallel_tool_calls", False, True),
        ("reasoning_effort", "an effort that no SDK knows yet", None),
        ("store", True, False),
    ],
)
def test_what_chat_asks_for_in_vain(name, given, neutral):
    assert read(ChatDialect(), CHAT | {name: given}).overrides == (name,)
    assert read(ChatDialect(), CHAT | {name: neutral}).overrides == ()


@pytest.mark.parametrize(
    ("name", "given", "neutral"),
    [
        ("temperature", 0.2, None),
        ("text", {"format": {"type": "json_schema", "name": "x", "schema": {}}}, {"format": {"type": "text"}}),
        ("tool_choice", {"type": "function", "name": "query"}, "auto"),
        ("truncation", "auto", "disabled"),
        ("include", ["message.output_text.logprobs"], ["reasoning.encrypted_content"]),
        ("store", True, False),
    ],
)
def test_what_responses_ask_for_in_vain(name, given, neutral):
    assert read(ResponsesDialect(), RESPONSES | {name: given}).overrides == (name,)
    assert read(ResponsesDialect(), RESPONSES | {name: neutral}).overrides == ()


@pytest.mark.parametrize(
    ("name", "given", "neutral"),
    [
        ("temperature", 1.0, None),
        ("top_k", 5, None),
        ("stop_sequences", ["\n"], []),
        ("tool_choice", {"type": "any"}, {"type": "auto"}),
        ("thinking", {"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}),
    ],
)
def test_what_messages_ask_for_in_vain(name, given, neutral):
    assert read(MessagesDialect(), MESSAGES | {name: given}).overrides == (name,)
    assert read(MessagesDialect(), MESSAGES | {name: neutral}).overrides == ()


def test_tools_of_other_kinds_are_left_out_and_named():
    chat = [
        {"type": "custom", "custom": {"name": "patch"}},
        {"type": "function", "function": FUNCTION | {"strict": True}},
    ]
    call = read(ChatDialect(), CHAT | {"tools": chat})
    assert (call.call.tools, call.overrides) == ((QUERY,), ("tools.custom", "tools.strict"))
    responses = [{"type": "web_search"}, {"type": "function"} | FUNCTION, {"type": "web_search"}]
    call = read(ResponsesDialect(), RESPONSES | {"tools": responses})
    assert (call.call.tools, call.overrides) == ((QUERY,), ("tools.web_search",))
    messages = [{"type": "bash_20250124", "name": "bash"}, {"name": "query", "input_schema": FUNCTION["parameters"]}]
    call = read(MessagesDialect(), MESSAGES | {"tools": messages})
    assert call.call.tools == (ToolSpec("query", "", FUNCTION["parameters"]),)
    assert call.overrides == ("tools.bash_20250124",)


def test_a_function_without_a_schema_takes_no_arguments():
    tools = [{"type": "function", "function": {"name": "stop"}}]
    assert read(ChatDialect(), CHAT | {"tools": tools}).call.tools == (ToolSpec("stop", ""),)


def test_the_smallest_bound_on_tokens_counts():
    assert read(ChatDialect(), CHAT).call.max_tokens is None
    assert read(ChatDialect(), CHAT | {"max_tokens": 7, "max_completion_tokens": 5}).call.max_tokens == 5
    assert read(ResponsesDialect(), RESPONSES | {"max_output_tokens": 6}).call.max_tokens == 6


def test_a_megabyte_of_tools_is_read():
    tools = [
        {"type": "function", "function": FUNCTION | {"name": f"query_{n}", "description": "x" * 300}}
        for n in range(3000)
    ]
    call = read(ChatDialect(), CHAT | {"tools": tools})
    assert len(call.call.tools) == 3000
    assert call.call.tools[-1].name == "query_2999"
