# ruff: noqa: E501 -- templates are written as models have them
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest

from ovmstrio.core.errors import InvalidField
from ovmstrio.core.generation import Conversation
from ovmstrio.inference.engine.chat_template import ChatTemplate, TemplateFailure, read_template_source
from ovmstrio.inference.engine.prompts import RenderQueue, TemplateProcess
from tests.support.tiny_llm import CHAT_TEMPLATE, write_tiny_folder

_WEATHER: Final = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
_MESSAGES: Final = (
    {"role": "system", "content": "Be <short> & 'kind'."},
    {"role": "user", "content": "Was kostet das? \u20ac"},
    {"role": "assistant", "content": "Nichts.\n"},
    {"role": "user", "content": "Ok"},
)
_LLAMA: Final = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ message['content'] | trim }}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
_ZEPHYR: Final = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n{{ '<|system|>\\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
_GEMMA: Final = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\\n\\n' %}"
    "{% set loop_messages = messages[1:] %}{% else %}{% set first = '' %}{% set loop_messages = messages %}{% endif %}"
    "{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + (first if loop.first else '') + message['content'] | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
_QWEN: Final = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.function.name ~ '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

_CALL_MESSAGES: Final = (
    {"role": "user", "content": "Paris?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "rain"},
)

_COMPARE: Final = """
import json, sys
import openvino_genai as genai
tokenizer = genai.Tokenizer(sys.argv[1])
answers = []
for template, messages, bos, options in json.load(sys.stdin):
    context = {"bos_token": "<s>", "eos_token": "</s>", **options}
    answers.append(tokenizer.apply_chat_template(messages, bos, template, extra_context=context))
json.dump(answers, sys.stdout)
"""


def test_prompts_are_those_of_openvino_genai(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    renderings: list[tuple[str, list[dict[str, Any]], bool, dict[str, Any]]] = [
        (template, [dict(message) for message in _MESSAGES], begins, options)
        for template in (CHAT_TEMPLATE, _LLAMA, _ZEPHYR, _GEMMA, _QWEN)
        for begins in (True, False)
        for options in ({}, {"enable_thinking": False})
    ]
    printed = subprocess.run(
        [sys.executable, "-c", _COMPARE, str(folder)],
        input=json.dumps(renderings).encode(),
        capture_output=True,
        check=True,
        timeout=120,
    )
    ours = [
        ChatTemplate(template, bos_token="<s>", eos_token="</s>").render(messages, (), begins, options)
        for template, messages, begins, options in renderings
    ]
    assert ours == json.loads(printed.stdout)
    assert len(set(ours)) == 9


def test_arguments_of_calls_are_objects_and_null_content_is_empty() -> None:
    made = ChatTemplate(_QWEN).render(_CALL_MESSAGES)
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>' in made
    assert "None" not in made
    assert made.endswith("<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_template_that_reads_parts_of_contents_gets_parts() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}: "
        "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }} {% endfor %}{% endfor %}"
    )
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "<mark>\nWhat?"},
        {"role": "assistant", "content": None},
    ]
    assert ChatTemplate(source).render(messages) == "user: <mark>\nWhat? assistant:  "
    both = "{% for m in messages %}{{ m.content if m.content is string else 'parts' }}{% endfor %}"
    assert ChatTemplate(both).render(messages) == "<mark>\nWhat?"


def test_tools_are_json_with_unescaped_letters() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "<gr\u00f6\u00dfer> & 'kleiner'"}}
    assert f"\n{json.dumps(tool, ensure_ascii=False)}\n</tools>" in ChatTemplate(_QWEN).render(_MESSAGES, (tool,))


def test_template_without_tools_gets_a_message_that_explains_them() -> None:
    template = ChatTemplate(CHAT_TEMPLATE)
    made = template.render([{"role": "system", "content": "Be kind."}, *_CALL_MESSAGES], (_WEATHER,))
    system, *_ = made.split("<|im_end|>")
    assert system.startswith("<|im_start|>system\nBe kind.\n\n")
    assert '{"name": "weather", "parameters"' in system
    assert '{"tool_calls": [{"name": "<name>"' in system
    assert '{"tool_calls": [{"name": "weather", "arguments": {"city": "Paris"}}]}' in made
    assert "<|im_start|>user\nResult of abcdefghi:\nrain<|im_end|>" in made
    assert template.render(_MESSAGES, (_WEATHER,)) != template.render(_MESSAGES)


def test_template_for_tools_is_used_with_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert _rendered(tmp_path) == "plain"
    assert _rendered(tmp_path, tools=(_WEATHER,)) == "1 tools"


def _rendered(folder: Path, *given: str, tools: Sequence[Any] = ()) -> str | None:
    found = read_template_source(folder, *given)
    template = None if found is None else ChatTemplate(**found.arguments)
    return None if template is None else template.render(_MESSAGES, tools)


def test_template_and_special_tokens_are_read_from_the_folder(tmp_path: Path) -> None:
    assert _rendered(tmp_path) is None
    assert _rendered(tmp_path, "given") == "given"
    settings = {"chat_template": "settings {{ bos_token }}", "bos_token": {"content": "<s>"}, "eos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert _rendered(tmp_path, "given") == "settings <s>"
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "<p>"}')
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}{{ eos_token }}{{ pad_token }}")
    assert _rendered(tmp_path) == "file <s><p>"
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TemplateFailure, match=r"tokenizer_config\.json"):
        read_template_source(tmp_path)


def test_extensions_of_chat_templates_are_supported() -> None:
    source = (
        "{% generation %}{{ strftime_now('%d %b %Y') }}{% endgeneration %}"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}[{{ m.role }}{{ m.nobody }}]{% endfor %}"
        "{{ tools is none }}{{ documents is none }}{{ {'b': 1, 'a': [true]} | tojson(indent=1) }}"
    )
    template = ChatTemplate(source + "{% if tools %}{% endif %}", now=lambda: datetime(2026, 7, 4, tzinfo=UTC))
    assert template.render(_MESSAGES) == '04 Jul 2026[system]TrueTrue{\n "b": 1,\n "a": [\n  true\n ]\n}'


def test_options_cannot_replace_messages() -> None:
    made = ChatTemplate(CHAT_TEMPLATE).render(
        _MESSAGES[1:2], (), True, {"messages": [], "add_generation_prompt": False}
    )
    assert made == "<|im_start|>user\nWas kostet das? \u20ac<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "text", "line"),
    [
        ("{{ raise_exception('only pairs') }}", "only pairs", 1),
        ("a\n{% if %}", "Expected an expression", 2),
        ("a\n\n{{ messages[0]['content'].nobody.more }}", "has no attribute 'nobody'", 3),
        ("\n{{ messages[0].content + 1 }}", "TypeError: can only concatenate str", 2),
        ("{{ messages | nobody }}", "No filter named 'nobody'", 1),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe", 1),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe", 1),
        ("{% include 'x' %}", "no loader", 1),
    ],
)
def test_failures_of_a_template_have_its_line(source: str, text: str, line: int) -> None:
    with pytest.raises(TemplateFailure, match=text) as failed:
        ChatTemplate(source).render(_MESSAGES)
    assert failed.value.line == line


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = 1 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * 'a' }}",
        "{{ ([0] * 1000000000) | length }}",
        "{{ 9 ** 9 ** 9 ** 9 ** 9 }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 1000000000) }}",
        "{{ 'a' | format }}{{ '%1000000000d' | format(1) }}",
        "{{ range(1000000000) | list }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x | replace('a', ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x.join(ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
        "{% for i in range(9000) %}" + "a" * 1000 + "{% endfor %}",
        "{% set x %}{% for i in range(9000) %}" + "a" * 1000 + "{% endfor %}{% endset %}",
        "{% call(x) nobody() %}{% endcall %}",
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "{% if a %}" * 5000,
    ],
)
def test_template_that_would_not_end_or_fill_memory_is_stopped(source: str) -> None:
    with pytest.raises(TemplateFailure) as failed:
        ChatTemplate(source).render(_MESSAGES)
    assert len(failed.value.text) < 300


def test_bounds_grow_with_the_conversation() -> None:
    messages = [{"role": role, "content": "x" * 2000} for role in ("user", "assistant")] * 2500
    for source in (CHAT_TEMPLATE, _LLAMA, _ZEPHYR, _GEMMA, _QWEN):
        assert len(ChatTemplate(source).render(messages)) > 10_000_000
    tools = [_WEATHER] * 1000
    assert ChatTemplate(_QWEN).render(_MESSAGES, tools).count('"weather"') == 1000


def test_renderings_share_no_variables_and_no_counted_work() -> None:
    template = ChatTemplate("{% for i in range(15000) %}{% endfor %}{{ x }}{% set x = 1 %}")
    assert [template.render(_MESSAGES, (), True, {"x": 5}), template.render(_MESSAGES)] == ["5", ""]


_HOSTILE: Final = Conversation(({"role": "user", "content": "hostile"},))
_PLAIN: Final = Conversation(({"role": "user", "content": "plain"},))
_SHARED: Final = (
    "{%- set ns = namespace(a=[1, 2], b=[1, 2], t=(1, 2), u=(1, 2), d={'k': 1}, e={'k': 1}) -%}"
    "{%- for i in range(60) -%}{%- set ns.a = [ns.a, ns.a] -%}{%- set ns.b = [ns.b, ns.b] -%}"
    "{%- set ns.t = (ns.t, ns.t) -%}{%- set ns.u = (ns.u, ns.u) -%}"
    "{%- set ns.d = {'x': ns.d, 'y': ns.d} -%}{%- set ns.e = {'x': ns.e, 'y': ns.e} -%}{%- endfor -%}"
)


# Each uses CPU time or memory in one call of C, which only the limit of the process ends.
_HOSTILE_SOURCES: Final = [
    *(
        _SHARED + source
        for source in (
            "{{ ns.a == ns.b }}",
            "{{ ns.a is in [ns.b] }}",
            "{{ [ns.t, ns.u] | sort }}",
            "{{ [{'k': ns.t}, {'k': ns.u}] | groupby('k') }}",
            "{{ {ns.t: 1} }}",
            "{{ ns.a | tojson }}",
            "{{ '%s' % (ns.a,) }}",
            "{{ [ns.b].count(ns.a) }}",
        )
    ),
    "{% set n = range(90000) | list %}{% for i in range(15000) %}{% if -1 in n %}{% endif %}{% endfor %}",
    "{{ '{:{}{}}'.format('a', '99999', '99999') | length }}",
]
"""Lists, tuples and dicts that have 2 ** 60 leaves, in 60 objects each; a is equal to b, t to u and d to e."""

_LIMIT_SECONDS: Final = 0.3


def _guarded(source: str) -> str:
    """Make a template hostile for one conversation, and plain for others."""
    return "{% if messages[0].content == 'hostile' %}" + source + "{% endif %}fine"


@pytest.fixture
def templates() -> Iterator[list[TemplateProcess]]:
    made: list[TemplateProcess] = []
    yield made
    for each in made:
        each.close()


@pytest.mark.parametrize("source", _HOSTILE_SOURCES)
def test_template_that_uses_too_much_cpu_time_or_memory_is_refused_and_the_next_rendering_works(
    source: str, templates: list[TemplateProcess]
) -> None:
    process = TemplateProcess({"source": _guarded(source)}, "the chat template x.jinja", _LIMIT_SECONDS)
    templates.append(process)
    with pytest.raises(InvalidField) as refused:
        process.render(_HOSTILE)
    assert refused.value.message.startswith("the chat template x.jinja ")
    assert len(refused.value.message) < 5000
    assert process.pid != os.getpid()
    assert process.render(_PLAIN) == "fine"


def test_killed_template_process_fails_its_rendering_and_is_replaced(templates: list[TemplateProcess]) -> None:
    process = TemplateProcess({"source": _guarded(_SHARED + "{{ ns.a == ns.b }}")}, "the chat template")
    templates.append(process)
    assert process.render(_PLAIN) == "fine"
    process.begin(_HOSTILE)
    os.kill(process.pid, signal.SIGSEGV)
    assert process.has_ended(30)
    with pytest.raises(InvalidField, match="the chat template ended its process with status -11"):
        process.take()
    assert process.render(_PLAIN) == "fine"


def test_renderings_are_done_in_order_and_can_be_withdrawn(templates: list[TemplateProcess]) -> None:
    process = TemplateProcess({"source": _guarded(_SHARED + "{{ ns.a == ns.b }}")}, "the chat template", _LIMIT_SECONDS)
    templates.append(process)
    renderings = RenderQueue[str](process)
    renderings.add("hostile", _HOSTILE, 0)
    for name in ("first", "second", "third"):
        renderings.add(name, _PLAIN, 30)
    assert renderings.waiting == 4
    renderings.withdraw("second")
    renderings.withdraw("hostile")
    assert renderings.waiting == 2
    taken = []
    while renderings.seconds_left is not None:
        assert process.has_ended(30)
        taken.append(renderings.take())
    assert taken == [None, ("first", "fine"), ("third", "fine")]


@pytest.mark.parametrize(("source", "reason"), [("{% if %}", "is invalid"), ("{{ 1 // 0 }}", "ZeroDivisionError")])
def test_invalid_template_is_the_error_of_each_request(
    source: str, reason: str, templates: list[TemplateProcess]
) -> None:
    process = TemplateProcess({"source": source}, "the chat template x.jinja")
    templates.append(process)
    for _ in range(2):
        with pytest.raises(InvalidField, match=rf"the chat template x\.jinja .*{reason}"):
            process.render(_PLAIN)
