"""Chat templates written in the manner of models that people train: each of them has a trait of its own."""

from __future__ import annotations

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Qwen 2: a default system message, and tools that are left out without a word."""

HERMES = r"""
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}
{%- else %}{%- set system = 'You are Q.' %}{%- endif %}
{{- '<|im_start|>system\n' + system }}
{%- if tools %}
    {{- '\n\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}
    {{- '\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""Qwen 2.5: calls as JSON in tags, results in a user's turn, no reasoning."""

THINKING = r"""
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n<think>\n' + (message.reasoning_content or '') | trim + '\n</think>\n\n' }}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content }}
        {%- if loop.first and tools %}{{- '\n' + tools | tojson(indent=2) }}{%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n<think>\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""
"""Qwen 3.5: the generation prompt opens the reasoning, calls are tags in tags."""

KEYED = r"""[gMASK]<sop>
{%- if tools %}
    {{- '<|system|>\n# Tools\n' }}
    {%- for tool in tools %}{{- tool | tojson(ensure_ascii=False) + '\n' }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>\n<think>' + (message.reasoning_content or '') + '</think>' }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>' + call.function.name + '\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key>\n<arg_value>' }}
                {{- (value if value is string else value | tojson(ensure_ascii=False)) + '</arg_value>\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
    {%- else %}
        {{- '<|' + message.role + '|>\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
"""GLM 4.5: a reply ends with the beginning of the next turn."""

BARE_JSON = r"""
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + date_string + '\n\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('only one call at once') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content | tojson + '<|eot_id|>' }}
    {%- elif message.role != 'system' %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
        {%- if loop.first or (loop.index0 == 1 and messages[0].role == 'system') %}
            {%- for tool in tools or [] %}{{- tool | tojson(indent=4) + '\n\n' }}{%- endfor %}
        {%- endif %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
"""Llama 3.1: a call is the whole reply, one at once, and the prompt knows the date."""

LISTED = r"""
{{- bos_token }}
{%- set last = namespace(user=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.index0 == last.user %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('ids have nine letters') }}{%- endif %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
            {{- ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('only user, assistant and tool speak here') }}
    {%- endif %}
{%- endfor %}
"""
"""Mistral: no system role, ids of nine letters, tools before the last question, nothing before a reply."""
