# ruff: noqa: E501, RUF001 -- texts have the form of model output
"""Malformed tool calls that models write, by family, and what they mean."""

from __future__ import annotations

from typing import Any, Final

from tests.support.parser_samples import Sample

_A: Final = {"text": "a"}
_NOW: Final[tuple[str, dict[str, Any]]] = ("now", {})


def _write(arguments: dict[str, Any], *more: tuple[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    return [("write", arguments), *more]


def _gemma(arguments: str) -> str:
    return f"<|tool_call>call:write{{{arguments}}}<tool_call|>"


def _liquid(calls: str) -> str:
    return f"<|tool_call_start|>{calls}<|tool_call_end|><|im_end|>"


def _qwen(inner: str) -> str:
    return f"<tool_call>\n<function=write>\n{inner}\n</tool_call>"


def _hermes(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


_BEGIN: Final = "<｜tool▁call▁begin｜>"
_END: Final = "<｜tool▁call▁end｜>"
_CALLS: Final = "<｜tool▁calls▁begin｜>"
_CALLS_END: Final = "<｜tool▁calls▁end｜>"
_SEP: Final = "<｜tool▁sep｜>"
_DONE: Final = "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
_ATEM: Final = '<atem:function_calls>\n<atem:invoke name="write">\n{}\n</atem:function_calls><|eom|>'

_Row = tuple[str, str, list[tuple[str, dict[str, Any]]]]

_CALLS_BY_FAMILY: Final[dict[str, list[_Row]]] = {
    "granite": [
        ("single quotes", "<|tool_call|>[{'name': 'write', 'arguments': {'text': 'a'}}]", _write(_A)),
        ("an end that is missing", '<|tool_call|>[{"name": "write", "arguments": {"text": "a"}', _write(_A)),
        (
            "a marker for each call",
            '<|tool_call|>[{"name": "write", "arguments": {"text": "a"}}]\n<tool_call>{"name": "now"}</tool_call>',
            _write(_A, _NOW),
        ),
    ],
    "kimi_k2": [
        (
            "no section",
            '<|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>{"text": "a"}<|tool_call_end|>',
            _write(_A),
        ),
        (
            "no arguments",
            "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|> <|tool_call_end|>",
            [_NOW],
        ),
        (
            "the other name of a section",
            (
                "<|tool_call_section_begin|><|tool_call_begin|>write:0<|tool_call_argument_begin|>{'text': 'a'}"
                "<|tool_call_end|><|tool_call_section_end|>"
            ),
            _write(_A),
        ),
        (
            "an end that is missing",
            (
                "<|tool_calls_section_begin|>\n<|tool_call_begin|> functions.write:0 <|tool_call_argument_begin|>"
                '{"text": "a"<|tool_calls_section_end|>'
            ),
            _write(_A),
        ),
    ],
    "nemotron": [
        ("no list", '<TOOLCALL>{"name": "write", "arguments": {"text": "a"}}</TOOLCALL>', _write(_A)),
        ("an end that is missing", '<TOOLCALL>[{"name": "write", "arguments": {"text": "a"}}]', _write(_A)),
        ("a bracket that is missing", '<TOOLCALL>[write(text="a")</TOOLCALL>', _write(_A)),
    ],
    "llama4_pythonic": [
        ("no list", "<|python_start|>write(text='a')<|python_end|>", _write(_A)),
        ("an end that is missing", '<|python_start|>[write(text="a")]', _write(_A)),
        ("calls of two lists", '[write(text="a")]\n[now()]', _write(_A, _NOW)),
        (
            "JSON after the marker",
            '<|python_start|>{"name": "write", "parameters": {"text": "a"}}<|python_end|>',
            _write(_A),
        ),
    ],
    "glm45": [
        (
            "no end of a value",
            "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>a\n<arg_key>size</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
            _write({"text": "a", "size": 2}),
        ),
        (
            "no end of the last value",
            "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>a\n</tool_call>",
            _write(_A),
        ),
        (
            "no end of the call",
            "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n<tool_call>now\n</tool_call>",
            _write(_A, _NOW),
        ),
        ("arguments in JSON", '<tool_call>write\n{"text": "a"}\n</tool_call>', _write(_A)),
    ],
    "gemma4": [
        ("double quotes in a list", _gemma('tags:["a}"]'), _write({"tags": ["a}"]})),
        ("single quotes in a list", _gemma("tags:['a', 'b']"), _write({"tags": ["a", "b"]})),
        ("quotes around keys", _gemma('size:{"mode": "fast"}'), _write({"size": {"mode": "fast"}})),
        (
            "a quoted value with an apostrophe",
            _gemma('text: "The user\'s name is john."'),
            _write({"text": "The user's name is john."}),
        ),
        (
            "a quoted value with quotes",
            _gemma('text:"He said "hi" there",size:2'),
            _write({"text": 'He said "hi" there', "size": 2}),
        ),
        ("an apostrophe in a bare word", _gemma("text:it's fine"), _write({"text": "it's fine"})),
        (
            "escapes in a quoted value",
            _gemma('text:"a\\nb \\"c\\" C:\\dir"'),
            _write({"text": 'a\nb "c" C:\\dir'}),
        ),
        ("no escapes between the format's quotes", _gemma('text:<|"|>a\\n"b"<|"|>'), _write({"text": 'a\\n"b"'})),
        ("an equals sign", _gemma("text='report.docx',size=3"), _write({"text": "report.docx", "size": 3})),
        (
            "an equals sign before the format's quotes",
            _gemma('text=<|"|>a=b:c<|"|>'),
            _write({"text": "a=b:c"}),
        ),
        ("no comma after a text", _gemma('text:<|"|>look<|"|>size:90'), _write({"text": "look", "size": 90})),
        ("no comma after a number", _gemma('size:3 text:<|"|>a<|"|>'), _write({"size": 3, "text": "a"})),
        ("no comma in a list", _gemma('tags:[<|"|>a<|"|> <|"|>b<|"|>]'), _write({"tags": ["a", "b"]})),
        ("no comma after a list", _gemma("tags:[1]size:2"), _write({"tags": [1], "size": 2})),
        ("a last comma", _gemma('tags:["a", "b",],'), _write({"tags": ["a", "b"]})),
        ("doubled braces", _gemma('{"text": "a"}'), _write(_A)),
        (
            "no last brace",
            '<|tool_call>call:write{tags:[{path:<|"|>c<|"|>,start:1}]<tool_call|>',
            _write({"tags": [{"path": "c", "start": 1}]}),
        ),
        ("no brace in a list", _gemma("tags:[{a:1,b:2]"), _write({"tags": [{"a": 1, "b": 2}]})),
        ("parentheses", '<|tool_call>call:write(text:"a")<tool_call|><turn|>', _write(_A)),
        ("a doubled name", '<|tool_call>call:write:write{text:"a"}<tool_call|>', _write(_A)),
        ("no closing marker", '<|tool_call>call:write{text:"a"}<turn|>', _write(_A)),
        ("no marker", 'call:write{text:<|"|>a<|"|>}', _write(_A)),
        ("JSON", '<|tool_call>{"name": "write", "arguments": {"text": "a"}}<tool_call|>', _write(_A)),
        (
            "JSON without a marker",
            '```json\n{"tool_calls": [{"name": "write", "arguments": {"text": "a"}}]}\n```',
            _write(_A),
        ),
    ],
    "qwen3coder": [
        (
            "no closing tag before a parameter",
            _qwen("<parameter=text>\na\n<parameter=size>\n3\n</parameter>\n</function>"),
            _write({"text": "a", "size": 3}),
        ),
        (
            "no closing tag after a number",
            _qwen("<parameter=size>\n3\n<parameter=text>\na\n</parameter>\n</function>"),
            _write({"size": 3, "text": "a"}),
        ),
        (
            "no closing tag, with indentation",
            _qwen("  <parameter=text>\n  a\n  <parameter=size>3</parameter>\n</function>"),
            _write({"text": "  a", "size": 3}),
        ),
        ("no closing tag of the last parameter", _qwen("<parameter=text>\na\n</function>"), _write(_A)),
        ("no closing tags", _qwen("<parameter=text>\na"), _write(_A)),
        (
            "no bracket of a list",
            _qwen("<parameter=tags>\n[1, {'k': 2\n</parameter>\n</function>"),
            _write({"tags": [1, {"k": 2}]}),
        ),
        ("no closing tag of the function", _qwen("<parameter=text>\na\n</parameter>"), _write(_A)),
        (
            "tags in a value",
            _qwen("<parameter=text>\n<f></function>\n<parameter=zz>\n</parameter>\n</function>"),
            _write({"text": "<f></function>\n<parameter=zz>"}),
        ),
        (
            "closing tags twice, and of another format",
            _qwen("<parameter=text>\na\n</parameter>\n</parameter>\n</function>\n</function>\n</function_invocation>"),
            _write(_A),
        ),
        ("no opening tag", "<function=write>\n<parameter=text>a</parameter>\n</function>\n</tool_call>", _write(_A)),
        ("quotes around a name", _qwen('<parameter="text">\na\n</parameter>\n</function>'), _write(_A)),
        ("arguments as JSON", _qwen('{"text": "a"}\n</function>'), _write(_A)),
        (
            "a list in Python's notation",
            _qwen("<parameter=tags>\n['a', True, None,]\n</parameter>\n</function>"),
            _write({"tags": ["a", True, None]}),
        ),
    ],
    "minicpm5": [
        (
            "text between CDATA tags",
            '<function name="write"><param name="text"><![CDATA[a <b> </param>\n& c]]></param></function><|im_end|>',
            _write({"text": "a <b> </param>\n& c"}),
        ),
        ("single quotes", "<function name='write'><param name='text'>a</param></function>", _write(_A)),
        (
            "no closing tag before a parameter",
            '<function name="write">\n  <param name="text">a\n  <param name="size">3</param>\n</function>',
            _write({"text": "a", "size": 3}),
        ),
        ("no closing tag of the last parameter", '<function name="write"><param name="text">a</function>', _write(_A)),
        (
            "no closing tag of the function",
            '<function name="write"><param name="tags">["a"]</param><|im_end|>',
            _write({"tags": ["a"]}),
        ),
    ],
    "onyx": [
        (
            "no closing tag before a parameter",
            _ATEM.format('<atem:parameter name="text">a\n<atem:parameter name="size">3</atem:parameter></atem:invoke>'),
            _write({"text": "a", "size": 3}),
        ),
        ("no closing tag of the parameter", _ATEM.format('<atem:parameter name="text">a</atem:invoke>'), _write(_A)),
        ("no closing tag of the call", _ATEM.format('<atem:parameter name="text">a</atem:parameter>'), _write(_A)),
    ],
    "hermes3": [
        ("no last brace", _hermes('{"name": "write", "arguments": {"text": "a"}'), _write(_A)),
        ("no last braces", _hermes('{"name": "write", "arguments": {"text": "a"'), _write(_A)),
        ("no last brace after a number", _hermes('{"name": "write", "arguments": {"size": 3'), _write({"size": 3})),
        ("no arguments and no brace", _hermes('{"name": "now"'), [_NOW]),
        ("no last brace at the end", '<tool_call>{"name": "write", "arguments": {"text": "a"}', _write(_A)),
        ("a surplus brace", _hermes('{"name": "write", "arguments": {"text": "a"}}}'), _write(_A)),
        ("doubled braces", _hermes('{{"name": "write", "arguments": {"text": "a"}}}'), _write(_A)),
        (
            "single quotes and Python's constants",
            _hermes("{'name': 'write', 'arguments': {'text': 'it\\'s \"a\"', 'size': None, 'x': True}}"),
            _write({"text": 'it\'s "a"', "size": None, "x": True}),
        ),
        (
            "line breaks and tabs in a text",
            _hermes('{"name": "write", "arguments": {"text": "a\nb\tc"}}'),
            _write({"text": "a\nb\tc"}),
        ),
        (
            "quotes in a text",
            _hermes('{"name": "write", "arguments": {"text": "print("hi") and "bye"", "size": 3}}'),
            _write({"text": 'print("hi") and "bye"', "size": 3}),
        ),
        ("an invalid escape", _hermes('{"name": "write", "arguments": {"text": "\\d\\\'"}}'), _write({"text": "\\d'"})),
        ("last commas", _hermes('{"name": "write", "arguments": {"tags": [1, 2,],},}'), _write({"tags": [1, 2]})),
        (
            "no commas",
            _hermes('{"name": "write" "arguments": {"text": "a" "size": 3}}'),
            _write({"text": "a", "size": 3}),
        ),
        (
            "no first quote of a key",
            _hermes('{"name": "write", "arguments": {text": "a", tags": [1]}}'),
            _write({"text": "a", "tags": [1]}),
        ),
        (
            "no quotes at one end of texts",
            _hermes('{"name": "write", "arguments": {"text": a", "tags": ["b" {"k": 1}], "size": 3}}'),
            _write({"text": "a", "tags": ["b", {"k": 1}], "size": 3}),
        ),
        (
            "no colons",
            _hermes('{"name": "write", "arguments" {"text" "a", "tags" ["b"], "size" 3}}'),
            _write({"text": "a", "tags": ["b"], "size": 3}),
        ),
        (
            "no bracket of a list before a key",
            _hermes('{"name": "write", "arguments": {"tags": ["b", "text": "a", "size": 3}}'),
            _write({"tags": ["b"], "text": "a", "size": 3}),
        ),
        ("a namespace", _hermes('{"name": "functions.write", "arguments": {"text": "a"}}'), _write(_A)),
        ("keys without quotes", _hermes('{name: "write", arguments: {text: "a"}}'), _write(_A)),
        (
            "brackets closed in the wrong order",
            _hermes('{"name": "write", "arguments": {"tags": [{"a": 1}, {"b": 2}}}'),
            _write({"tags": [{"a": 1}, {"b": 2}]}),
        ),
        (
            "OpenAI's form",
            _hermes('{"type": "function", "function": {"name": "write", "arguments": {"text": "a"}}, "id": "1"}'),
            _write(_A),
        ),
        (
            "an array",
            _hermes('[{"name": "write", "arguments": {"text": "a"}}, {"name": "now", "arguments": {}}]'),
            _write(_A, _NOW),
        ),
        (
            "two calls in a tag",
            _hermes('{"name": "write", "arguments": {"text": "a"}}\n{"name": "now", "arguments": {}}'),
            _write(_A, _NOW),
        ),
        (
            "no last brace before another call",
            _hermes('{"name": "write", "arguments": {"text": "a"}') + _hermes('{"name": "now", "arguments": {}'),
            _write(_A, _NOW),
        ),
        ("no tags", '{"name": "write", "arguments": {"text": "a"}}', _write(_A)),
        ("a code block", '```json\n{"name": "write", "arguments": {"text": "a"}}\n```', _write(_A)),
        (
            "the closing tag in a text",
            _hermes('{"name": "write", "arguments": {"text": "</tool_call> "}}'),
            _write({"text": "</tool_call> "}),
        ),
    ],
    "llama3": [
        ("no last brace", '<|python_tag|>{"name": "write", "parameters": {"text": "a"}<|eom_id|>', _write(_A)),
        ("single quotes", "{'name': 'write', 'parameters': {'text': 'a'}}", _write(_A)),
        (
            "an array without the marker",
            '[{"name": "write", "parameters": {"text": "a"}}, {"name": "now", "parameters": {}}]',
            _write(_A, _NOW),
        ),
        (
            "lines without the marker",
            '{"name": "write", "parameters": {"text": "a"}}\n{"name": "now", "parameters": {}}<|eot_id|>',
            _write(_A, _NOW),
        ),
        ("a tag with the name", '<function=write>{"text": "a"}</function><|eom_id|>', _write(_A)),
        ("the name as function", '{"type": "function", "function": "write", "parameters": {"text": "a"}}', _write(_A)),
    ],
    "phi4": [
        (
            "tool_call tags",
            '<|tool_call|>[{"name": "write", "arguments": {"text": "a"}}]<|/tool_call|><|end|>',
            _write(_A),
        ),
        ("both markers", '<|tool_call|>functools[{"name": "write", "arguments": {"text": "a"}}]<|end|>', _write(_A)),
        ("an array without the marker", '[{"name": "write", "arguments": {"text": "a"}}]<|end|>', _write(_A)),
        ("an object without the marker", '{"name": "write", "parameters": {"text": "a"}}', _write(_A)),
        ("an object", 'functools{"name": "write", "arguments": {"text": "a"}}', _write(_A)),
        ("no last bracket", 'functools[{"name": "write", "arguments": {"text": "a"}}', _write(_A)),
        ("no last brackets", 'functools[{"name": "write", "arguments": {"text": "a"}<|end|>', _write(_A)),
        (
            "no brace between calls",
            'functools[{"name": "write", "arguments": {"text": "a"}, {"name": "now", "arguments": {}}]',
            _write(_A, _NOW),
        ),
        (
            "OpenAI's form",
            'functools [{"type": "function", "function": {"name": "write", "parameters": {"text": "a"}}}]',
            _write(_A),
        ),
    ],
    "mistral": [
        ("single quotes", "[TOOL_CALLS] [{'name': 'write', 'arguments': {'text': 'a'}}]</s>", _write(_A)),
        ("an object", '[TOOL_CALLS]{"name": "write", "arguments": {"text": "a"}}', _write(_A)),
        ("no last brackets", '[TOOL_CALLS][{"name": "write", "arguments": {"text": "a"</s>', _write(_A)),
        ("no last brace", '[TOOL_CALLS]write{"text": "a"</s>', _write(_A)),
        ("single quotes after the name", "[TOOL_CALLS]write[ARGS]{'text': 'a'}</s>", _write(_A)),
        (
            "no last brace before another call",
            '[TOOL_CALLS]write[ARGS]{"text": "a"[TOOL_CALLS]now[ARGS]{}',
            _write(_A, _NOW),
        ),
    ],
    "lfm2": [
        ("JSON", _liquid('[{"name": "write", "arguments": {"text": "a"}}]'), _write(_A)),
        ("a JSON object", _liquid('{"name": "write", "parameters": {"text": "a"}}'), _write(_A)),
        (
            "JSON calls",
            _liquid('[{"name": "write", "arguments": {"text": "a"}}, {"name": "now", "arguments": {}}]'),
            _write(_A, _NOW),
        ),
        ("JSON without markers", '[{"name": "write", "arguments": {"text": "a"}}]', _write(_A)),
        ("no markers", '[write(text="a")]', _write(_A)),
        ("no brackets", _liquid('write(text="a")'), _write(_A)),
        ("no last brackets", _liquid('[write(text="a", tags=["b"'), _write({"text": "a", "tags": ["b"]})),
        ("no parenthesis", _liquid('[write(text="a"]'), _write(_A)),
        ("no commas", _liquid('[write(text="a" size=3) now()]'), _write({"text": "a", "size": 3}, _NOW)),
        ("a last comma", _liquid('[write(text="a",)]'), _write(_A)),
        ("a word without quotes", _liquid("[write(text=a)]"), _write(_A)),
        ("quotes in a text", _liquid('[write(text="the "b" c", size=1)]'), _write({"text": 'the "b" c', "size": 1})),
        ("three quotes", _liquid('[write(text="""a "b"\nc""")]'), _write({"text": 'a "b"\nc'})),
        (
            "no bracket of a list",
            _liquid('[write(tags=["b", {"k": 1}, size=3)]'),
            _write({"tags": ["b", {"k": 1}], "size": 3}),
        ),
        ("colons", _liquid('[write(text: "a", size: 3)]'), _write({"text": "a", "size": 3})),
        ("a namespace", _liquid('[functions.write(text="a")]'), _write(_A)),
    ],
    "deepseek": [
        (
            "no opening marker of the call",
            f'{_CALLS}function{_SEP}write\n```json\n{{"text": "a"}}\n```{_END}{_CALLS_END}',
            _write(_A),
        ),
        ("no code block", f'{_CALLS}{_BEGIN}function{_SEP}write\n{{"text": "a"}}\n{_END}{_CALLS_END}', _write(_A)),
        ("a code block after the name", f'{_BEGIN}write{_SEP}```json\n{{"text": "a"}}\n```{_END}', _write(_A)),
        (
            "no last brace in a code block",
            f'{_BEGIN}function{_SEP}write\n```json\n{{"text": "a"\n```{_END}',
            _write(_A),
        ),
        ("no last brace", f'{_BEGIN}write{_SEP}{{"text": "a"{_END}{_CALLS_END}', _write(_A)),
        ("no closing markers", f'{_CALLS}{_BEGIN}write{_SEP}{{"text": "a"}}', _write(_A)),
        ("a repeated marker", f"{_CALLS}{_CALLS}{_BEGIN}now{_SEP}{{}}{_END}", [_NOW]),
        ("a code block in a text", f'{_BEGIN}write{_SEP}{{"text": "```\\na"}}{_END}', _write({"text": "```\na"})),
    ],
    "gptoss": [
        (
            "a doubled channel",
            '<|channel|>commentary to=functions.write<|channel|>commentary?<|message|>{"text": "a"}<|call|>',
            _write(_A),
        ),
        (
            "no namespace",
            '<|channel|>commentary to=write <|constrain|>json<|message|>{"text": "a"}<|call|>',
            _write(_A),
        ),
        (
            "another namespace",
            '<|channel|>commentary to=tools.write json<|message|>{"text": "a"}<|call|>',
            _write(_A),
        ),
        (
            "the type at the name",
            '<|channel|>commentary to=functions.writejson<|message|>{"text": "a"}<|call|>',
            _write(_A),
        ),
        ("no message marker", '<|channel|>commentary to=functions.write json {"text": "a"}<|call|>', _write(_A)),
        (
            "no start marker",
            ' to=functions.write<|channel|>commentary json<|message|>{"text": "a"}<|call|>',
            _write(_A),
        ),
        ("no last brace", '<|channel|>commentary to=functions.write<|message|>{"text": "a"<|call|>', _write(_A)),
        (
            "the analysis channel",
            '<|channel|>analysis to=functions.write code<|message|>{"text": "a"}<|call|>',
            _write(_A),
        ),
    ],
    "generic": [
        ("single quotes", "{'tool_calls': [{'name': 'write', 'arguments': {'text': 'a'}}]}", _write(_A)),
        ("a code block", '```json\n{"tool_calls": [{"name": "write", "arguments": {"text": "a"}}]}\n```', _write(_A)),
        ("an object", '{"tool_calls": {"name": "write", "arguments": {"text": "a"}}}', _write(_A)),
        ("the call alone", '{"name": "write", "arguments": {"text": "a"}}', _write(_A)),
        (
            "no last brackets",
            '{"tool_calls": [{"name": "write", "arguments": {"text": "a"}}, {"name": "now", "arguments": {}',
            _write(_A, _NOW),
        ),
    ],
}

MALFORMED: Final = tuple(
    (f"{family}, {fault}", family, written, calls)
    for family, rows in _CALLS_BY_FAMILY.items()
    for fault, written, calls in rows
)
"""Name, parser, text, and the calls with their arguments; the text has no content."""

RECOVERED: Final = (
    Sample(
        "hermes3, text between calls",
        "hermes3",
        'One.\n<tool_call>{"name": "now", "arguments": {}\n</tool_call>\nTwo.\n<tool_call>{"name": "now"}</tool_call>Three.',
        "One.Two.Three.",
        calls=(("now", "{}"), ("now", "{}")),
    ),
    Sample(
        "hermes3, an object of an answer", "hermes3", '{"name": "Bingo", "age": 30}', '{"name": "Bingo", "age": 30}'
    ),
    Sample(
        "hermes3, a call in reasoning without an end",
        "hermes3",
        '<think>I look.\n<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        thought="I look.",
        calls=(("now", "{}"),),
        reasoning="qwen3",
    ),
    Sample(
        "hermes3, a draft of a call in reasoning",
        "hermes3",
        '<think>I try <tool_call>{"name": "now"}</tool_call>.</think><tool_call>{"name": "now"}</tool_call>',
        thought='I try <tool_call>{"name": "now"}</tool_call>.',
        calls=(("now", "{}"),),
        reasoning="qwen3",
    ),
    Sample(
        "qwen3coder, a call in reasoning that the prompt began",
        "qwen3coder",
        "I look.\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        thought="I look.",
        calls=(("now", "{}"),),
        reasoning="qwen3",
        opened=True,
    ),
    Sample(
        "gemma4, a call in reasoning without an end",
        "gemma4",
        "<|channel>thought\nI look.<|tool_call>call:now{}<tool_call|><|tool_response>",
        thought="I look.",
        calls=(("now", "{}"),),
        reasoning="gemma4",
    ),
    Sample(
        "gemma4, a call without a marker after reasoning",
        "gemma4",
        "<|channel>thought\nI look.\n<channel|>call:now{}",
        thought="I look.",
        calls=(("now", "{}"),),
        reasoning="gemma4",
    ),
    Sample(
        "gemma4, a call without a marker after text", "gemma4", "Well.\ncall:now{}\n", "Well.", calls=(("now", "{}"),)
    ),
    Sample("gemma4, a word that is no call", "gemma4", "call:absent{a:1}", "call:absent{a:1}"),
    Sample(
        "llama3, text around a call",
        "llama3",
        'Sure: {"name": "now", "parameters": {}} Would you?',
        "Sure:Would you?",
        calls=(("now", "{}"),),
    ),
    Sample("llama3, another object", "llama3", '{"a": 1} is a dict', '{"a": 1} is a dict'),
    Sample("phi4, an empty array", "phi4", "functools[]", "functools[]"),
    Sample("phi4, text in brackets", "phi4", "functools[ This is just text ]", "functools[ This is just text ]"),
    Sample(
        "mistral, text after calls", "mistral", '[TOOL_CALLS][{"name": "now"}]$$ So', "$$ So", calls=(("now", "{}"),)
    ),
    Sample("lfm2, arguments without names", "lfm2", '<|tool_call_start|>[now("a")]', '<|tool_call_start|>[now("a")]'),
    Sample("deepseek, an empty list of calls", "deepseek", f"{_CALLS}hello", "hello"),
    Sample(
        "gptoss, a message to the model itself",
        "gptoss",
        "<|channel|>commentary to=assistant<|channel|>commentary?<|message|>Words<|end|>" + _DONE,
        "Done.",
        "Words",
        reasoning="gptoss",
    ),
    Sample(
        "gptoss, a message to a tool that the request does not have",
        "gptoss",
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>" + _DONE,
        "Done.",
        "print(1)",
        reasoning="gptoss",
    ),
    Sample(
        "gptoss, a message from a tool",
        "gptoss",
        '<|start|>functions.now to=assistant<|channel|>commentary<|message|>{"r": 1}<|end|>' + _DONE,
        "Done.",
        '{"r": 1}',
        reasoning="gptoss",
    ),
    Sample(
        "gptoss, text in a header",
        "gptoss",
        "<|channel|>?? hm<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>" + _DONE,
        "Done.",
        "?? hmHm.",
        reasoning="gptoss",
    ),
    Sample(
        "gptoss, no end of a message",
        "gptoss",
        "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Done.<|return|>",
        "Done.",
        "Hm.",
        reasoning="gptoss",
    ),
    Sample(
        "gptoss, a function that the request does not have",
        "gptoss",
        "<|channel|>commentary to=functions.absent<|message|>{}<|call|>",
        calls=(("absent", "{}"),),
        reasoning="gptoss",
    ),
)
"""Text around calls, and text that only resembles a call."""
