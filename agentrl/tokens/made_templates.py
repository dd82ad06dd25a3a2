"""Chat templates of the models that agentrl makes, so that others can talk to what it exports.

They give the very ids that the hand-written renderers of these formats give: tests hold them together.
"""

from __future__ import annotations

import json

from agentrl.tokens.config import ChatConfig

_CHATML = "agentrl.tokens.chatml:ChatMLToolRenderer"

QWEN3_TEMPLATE = r"""
{%- macro system_turn() %}
    {%- set has_system = messages[0].role == 'system' %}
    {%- if tools %}
        {{- '<|im_start|>system\n' }}
        {%- if has_system %}{{- messages[0].content + '\n\n' }}{%- endif %}
        {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
        {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
        {%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}
        {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within ' }}
        {{- '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": ' }}
        {{- '<args-json-object>}\n</tool_call><|im_end|>\n' }}
    {%- elif has_system %}
        {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
    {%- endif %}
{%- endmacro %}
{%- macro call_block(call) %}
    {%- set function = call.function or call %}
    {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' }}
    {{- function.arguments if function.arguments is string else function.arguments | tojson }}
    {{- '}\n</tool_call>' }}
{%- endmacro %}
{%- set last = namespace(question=messages | length - 1) %}
{%- for message in messages %}
    {%- set text = message.content | trim %}
    {%- set is_result = text.startswith('<tool_response>') and text.endswith('</tool_response>') %}
    {%- if message.role == 'user' and not is_result %}{%- set last.question = loop.index0 %}{%- endif %}
{%- endfor %}
{{- system_turn() }}
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content or '' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > last.question and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if content or not loop.first %}{{- '\n' }}{%- endif %}
            {{- call_block(call) }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
""".lstrip()

_CHATML_TEMPLATE = r"""
{%- set has_system = messages[0].role == 'system' %}
{%- set system = messages[0].content if has_system else DEFAULT_SYSTEM %}
{%- if system or tools %}
    {{- '<|im_start|>system\n' + system }}
    {%- if tools %}
        {%- if system %}{{- '\n\n' }}{%- endif %}
        {{- '# Tools\n\nYou may call functions to answer. ' }}
        {{- 'Their signatures are within <tools></tools> tags:\n<tools>\n' }}
        {%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}
        {{- '</tools>\n\nTo call a function, return a json object with its name and arguments within ' }}
        {{- '<tool_call></tool_call> tags:\n<tool_call>\n{"name": <function-name>, "arguments": ' }}
        {{- '<args-json-object>}\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- set talk = messages[1:] if has_system else messages %}
{%- for message in talk %}
    {%- set content = message.content or '' %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {%- if content or not loop.first %}{{- '\n' }}{%- endif %}
            {%- set value = {'name': function.name, 'arguments': function.arguments} %}
            {{- '<tool_call>\n' + value | tojson + '\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '\n' if loop.previtem and loop.previtem.role == 'tool' else '<|im_start|>user\n' }}
        {{- '<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if not loop.nextitem or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
""".lstrip()


def chatml_template(system: str = "") -> str:
    """ChatML with tools as text, as `agentrl.tokens.chatml` renders it; `system` is for conversations without one."""
    return _CHATML_TEMPLATE.replace("DEFAULT_SYSTEM", json.dumps(system, ensure_ascii=False))


def made_template(config: ChatConfig) -> str | None:
    """The template of a model that is made to be spoken to in this format; None for a format that is not ours."""
    if config.renderer in ("auto", "template", "qwen3"):
        return QWEN3_TEMPLATE
    return chatml_template(config.options.get("system", "")) if config.renderer == _CHATML else None
