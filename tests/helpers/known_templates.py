"""Chat templates in the manner of well-known model families, shortened, and the expressions and statements of templates."""
# ruff: noqa: E501

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA_3 = """\
{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN_3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '

' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '

' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '
' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{#- This block checks for alternating user/assistant messages, skipping tool calling messages #}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] " + tools|tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}
                {{- ", " }}
            {%- else %}
                {{- "]" + eos_token }}
            {%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}
"""

HERMES_TOOLS = """\
{%- macro json_to_python_type(json_spec) %}
    {%- set basic_type_map = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"} %}
    {%- if basic_type_map[json_spec.type] is defined %}
        {{- basic_type_map[json_spec.type] }}
    {%- elif json_spec.type == "array" %}
        {{- "list[" +  json_to_python_type(json_spec|items) + "]" }}
    {%- elif json_spec.type is iterable and json_spec.type is not string %}
        {{- "Union[" }}
        {%- for t in json_spec.type %}
            {{- json_to_python_type({"type": t}) }}{% if not loop.last %}{{ "," }}{% endif %}
        {%- endfor %}
        {{- "]" }}
    {%- else %}
        {{- "Any" }}
    {%- endif %}
{%- endmacro %}
{%- macro describe(spec) -%}
    {%- for name, value in spec|items|sort %}{{ name|upper }}={{ value|join('/') if value is iterable and value is not string else value }};{% endfor -%}
{%- endmacro %}
{{- bos_token }}
{%- for message in messages %}
    {{- message.role|capitalize ~ ": " ~ (message.content or '')|replace('\\r', '')|indent(2) ~ "\\n" }}
    {%- for call in message.tool_calls or [] %}
        {{- call.id|default('?', true) }} {{ call.function.name }}({{ call.function.arguments|tojson(indent=2) }})
        {{- json_to_python_type({"type": ["string", "integer", "x"]}) }}
        {{- describe({'b': [1, 2], 'a': 'z'}) }}
        {{- "%s/%02d" % (call.function.name, loop.index) }} {{ "{}:{}".format(call.id, loop.index) }}
    {%- endfor %}
    {%- if loop.index0 is even and not loop.last and message.role in ['user', 'system'] %}{% continue %}{% endif %}
    {{- messages|map(attribute='role')|unique|join(',') if loop.last }}
{%- endfor %}
{{- 'assistant:' if add_generation_prompt }}
"""

KNOWN = {
    "chatml": CHATML,
    "llama 3": LLAMA_3,
    "qwen 3": QWEN_3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "hermes": HERMES_TOOLS,
}

EXPRESSIONS = r"""
'ab' * 3
3 * 'ab'
[1] * 2
7 // 2
7 / 2
7 % 4
2 ** 8
-3 + 1.5
1 + true
'%s-%d' % ('a', 1)
'%(a)s%%' % {'a': 1}
'(%05.2f) 2024' % 3.14159
'{}{x:>4}'.format(1, x=2)
'a' ~ 1 ~ none ~ [1, 'b']
'b' in 'abc'
'x' not in ['a']
1 < 2 <= 2 != 3
'a' in {'a': 1}
2 in range(3)
3 in [1, 2]|map('abs')
[1, 2, 3][::-1]
'abcdef'[1:5:2]
(1, 2, 3)[:2]
{'a': 1}.items()|list
{'a': 1}.get('b', 2)
{'a' ~ 1: 2}
' ab '|trim
'xab'|trim('x')
'ab'|upper|lower|capitalize|title
'aab'|replace('a', 'b', 1)
'a\nb'|indent
'a\n\nb'|indent(2, true, true)
'a\nb'|indent('> ')
[1, 'a']|join('-')
[{'a': 1}]|join(',', attribute='a')
'abc'|first ~ 'abc'|last
[3, 1, 2]|sort|string
[3, 1]|max + [3, 1]|min
[1, 2]|sum
[1, 1]|unique|list
[{'a': 2}]|sum(attribute='a')
{'b': 1, 'a': 2}|dictsort
{'a': 1}|items|list
'3'|int + '1.5'|float
-2|abs
3.14159|round(2)
2.5|round(0, 'floor')
none|default('x')
''|d('x', true)
'abc'|reverse
'a b c'|truncate(4)
[1, 2, 3]|select('odd')|list
[1, 2]|reject('even')|list
[1]|map('string')|list
'%s'|format(1)
'abc'|length
[{'a': 1}]|selectattr('a', 'eq', 1)|list
[{'a': 1}]|rejectattr('a')|list
[{'a': 1}]|map(attribute='a')|list
[{'a': 1}, {'a': 1}]|groupby('a')|list|length
'a'|attr('upper') is defined
{'a': [1, 'ü']}|tojson
[]|tojson
{'a': [1]}|tojson(indent=2)
'a' is lower
'A' is upper
3 is odd
4 is even
9 is divisibleby 3
1 is in [1]
1 is number
'a' is string
{} is mapping
[] is sequence
none is none
x is undefined
1 is ge 1
1 is eq 1
'a b'.split()
'a,b,c'.split(',', 1)
'a,b'.rsplit(',')
'a\nb'.splitlines()
'-'.join(['a', 'b'])
'abc'.find('c')
'abc'.count('b')
'abc'.replace('b', '')
'abc'.startswith(('a', 'b'))
'abc'.endswith('c')
'xabx'.strip('x')
'a-b'.partition('-')
'a'.rjust(3) ~ 'a'.ljust(3) ~ 'a'.center(3) ~ '7'.zfill(3)
'a1'.isalnum()
'a'.upper().lower().title().capitalize()
[1, 2].index(2)
'ab'.removeprefix('a')
[1].copy()
cycler(1, 2).next()
namespace(a=1).a
dict(a=1)
range(3)|list
'<a>'|safe
'abc' if x else 'd'
joiner(',')()
x
none
1.0
""".strip().splitlines()

STATEMENTS = (
    "{% for a in [1, 2, 3] if a is odd %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ a }}{% else %}x{% endfor %}",
    "{% for a in [] %}{% else %}empty{% endfor %}{% for a in x %}{% else %}undefined{% endfor %}",
    "{% for a in [1, 2, 3, 4]|select('even') %}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }}{% endfor %}",
    "{% for a, b in {'a': 1, 'b': 2}.items() %}{{ loop.cycle('x', 'y') }}{{ a }}{{ b }}{{ loop.changed(a) }}{% endfor %}",
    "{% for a in 'abc' %}{% if a == 'b' %}{% continue %}{% endif %}{{ a }}{% if a == 'c' %}{% break %}{% endif %}{% endfor %}",
    "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1) }}{{ f(1, 3, 4, c=5) }}{{ f(*[1, 2, 3]) }}",
    "{% macro f() %}<{{ caller(1) }}>{% endmacro %}{% call(x) f() %}{{ x }}{% endcall %}{{ f(**{'caller': none}) if false }}",
    "{% set ns = namespace(x=1) %}{% for i in range(3) %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}",
    "{% set x %}a{{ 1 }}{% endset %}{% set y | upper %}b{% endset %}{{ x }}{{ y }}{% filter upper %}c{{ x }}{% endfilter %}",
    "{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}{{ a }}{% set a, b = [1, 2] %}{{ b }}",
    "{% if x is defined %}a{% elif 1 > 2 %}b{% elif true %}c{% else %}d{% endif %}  \n  {%- if 1 %} e {% endif -%}\n f",
)
