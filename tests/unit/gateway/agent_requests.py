"""Requests in the shape in which three agents send them; their texts are short and our own."""

from __future__ import annotations

_SHELL = {
    "type": "object",
    "properties": {"command": {"type": "array", "items": {"type": "string"}}, "timeout_ms": {"type": "number"}},
    "required": ["command"],
    "additionalProperties": False,
}

# codex leaves ids, annotations and states of earlier items out, and sends its reasoning back without its text.
CODEX = {
    "model": "main",
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions>sandboxed</permissions>"}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "<environment_context>cwd</environment_context>"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix the bug."}]},
        {"type": "reasoning", "summary": [], "encrypted_content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look at it."}]},
        {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls", "-l"]}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "total 0"},
        {"type": "function_call", "name": "shell", "arguments": '{"command": ', "call_id": "call_2"},
        {"type": "function_call_output", "call_id": "call_2", "output": "failed to parse function arguments"},
        {
            "type": "function_call",
            "name": "spawn_agent",
            "namespace": "multi_agent_v1",
            "arguments": '{"message": "Look."}',
            "call_id": "call_3",
        },
        {"type": "function_call_output", "call_id": "call_3", "output": "{}"},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs it.", "strict": False, "parameters": _SHELL},
        {"type": "function", "name": "update_plan", "description": "Plans.", "strict": False, "parameters": {}},
        {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": {"type": "grammar"}},
        {"type": "local_shell"},
        {"type": "web_search", "external_web_access": False},
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Sub-agents.",
            "tools": [
                {
                    "type": "function",
                    "name": "spawn_agent",
                    "description": "Spawns one.",
                    "strict": False,
                    "parameters": {"type": "object", "properties": {"message": {"type": "string"}}},
                }
            ],
        },
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199-session",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "0"},
}

CLAUDE_CODE = {
    "model": "main",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday.\n</system-reminder>\n"},
                {"type": "text", "text": "Fix the bug.", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Where?", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "call-0", "name": "Bash", "input": {"command": "ls"}},
                {"type": "tool_use", "id": "call-1", "name": "Stop", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call-0", "content": "a.py\nb.py", "is_error": False},
                {"type": "tool_result", "tool_use_id": "call-1", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "<system-reminder>\nGo on.\n</system-reminder>"},
            ],
        },
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "You help with software.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Runs it.",
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
                "additionalProperties": False,
            },
            "eager_input_streaming": True,
        },
        {"name": "Stop", "input_schema": {"type": "object", "properties": {}}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "user_0_account__session_1"},
    "max_tokens": 32000,
    "temperature": 1,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "stream": True,
}

# litellm's messages carry its own fields and nulls.
MINI_SWE_AGENT = {
    "model": "main",
    "messages": [
        {"role": "system", "content": "You can use bash."},
        {"role": "user", "content": "Fix the bug."},
        {
            "content": "```mswea_bash_command\nls\n```",
            "role": "assistant",
            "tool_calls": None,
            "function_call": None,
            "provider_specific_fields": {"refusal": None},
        },
        {"role": "user", "content": "<returncode>0</returncode>\n<output>\na.py</output>"},
    ],
    "temperature": 0.0,
}
MINI_SWE_AGENT_TOOLS = {
    "model": "main",
    "messages": [
        *MINI_SWE_AGENT["messages"][:2],
        {
            "content": None,
            "role": "assistant",
            "tool_calls": [
                {"function": {"arguments": '{"command": "ls"}', "name": "bash"}, "id": "call-0", "type": "function"}
            ],
            "function_call": None,
            "reasoning_content": "Hm.",
            "provider_specific_fields": {"refusal": None, "reasoning_content": "Hm."},
        },
        {"role": "tool", "tool_call_id": "call-0", "content": "a.py"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "bash",
                "description": "Execute a bash command",
                "parameters": {
                    "type": "object",
                    "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
                    "required": ["command"],
                },
            },
        }
    ],
    "parallel_tool_calls": True,
}
