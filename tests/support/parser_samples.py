# ruff: noqa: E501, RUF001 -- texts have the form of model output
"""Texts of models and their parsed results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Sample:
    """Text of a model, its parsers and the expected result.

    Calls are names and raw arguments; ``ids`` are their identifiers if the model writes them.
    """

    name: str
    tools: str
    written: str
    content: str = ""
    thought: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = "none"
    opened: bool = False
    ids: tuple[str, ...] = ()


def _tool(name: str, properties: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS: Final = (
    _tool("weather", {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}}),
    _tool("write", {"text": {"type": "string"}, "tags": {"type": "array"}, "size": {"type": ["number", "null"]}}),
    _tool("now", {}),
)

_PARIS: Final = ("weather", '{"city": "Paris"}')
_DEEP: Final = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"

SAMPLES: Final = (
    Sample("plain text", "none", " as it is <tool_call>\n ", " as it is <tool_call>\n "),
    Sample("thought, then text", "none", "<think>\nwhy?\n</think>\n\nso.\n", "so.\n", "why?", reasoning="qwen3"),
    Sample(
        "thought that the prompt began", "none", "why?\n</think>\nso.", "so.", "why?", reasoning="deepseek", opened=True
    ),
    Sample(
        "thought without an end", "hermes3", "<think>why? <tool_call>", thought="why? <tool_call>", reasoning="qwen3"
    ),
    Sample("a marker that comes too late", "none", "say <think>x</think>", "say <think>x</think>", reasoning="qwen3"),
    Sample("no thought", "none", "<thing> </think>", "<thing> </think>", reasoning="qwen3"),
    Sample(
        "hermes3",
        "hermes3",
        '<think>hm</think>\nLet me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>{"name":"now","arguments":{}}</tool_call> done',
        "Let me look.done",
        "hm",
        calls=(_PARIS, ("now", "{}")),
        reasoning="qwen3",
    ),
    Sample(
        "arguments with brackets and tags in texts",
        "hermes3",
        '<tool_call>{"name": "write", "arguments": {"text": "}]\\"</tool_call>\\\\", "tags": [{"a": "{"}]}}</tool_call>',
        calls=(("write", '{"text": "}]\\"</tool_call>\\\\", "tags": [{"a": "{"}]}'),),
    ),
    Sample(
        "arguments before the name",
        "hermes3",
        '<tool_call>{"id": 7, "arguments": {"city": "Paris"}, "name": "weather"}</tool_call>',
        calls=(_PARIS,),
    ),
    Sample(
        "arguments as a text, as null, and none",
        "hermes3",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>'
        '<tool_call>{"name": "now", "arguments": null}</tool_call><tool_call>{"name": "now"}</tool_call>',
        calls=(_PARIS, ("now", "{}"), ("now", "{}")),
    ),
    Sample(
        "an object that is no call, and one that is",
        "hermes3",
        'see <tool_call>{"nam": 1}</tool_call> and <tool_call>[1]<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        'see <tool_call>{"nam": 1}</tool_call> and <tool_call>[1]',
        calls=(("now", "{}"),),
    ),
    Sample(
        "a call that is cut before its name", "hermes3", 'a <tool_call>\n{"name": "wea', 'a <tool_call>\n{"name": "wea'
    ),
    Sample(
        "a call that is cut in its arguments",
        "hermes3",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Pa',
        calls=(("weather", '{"city": "Pa'),),
    ),
    Sample(
        "a call without its closing tag",
        "hermes3",
        '<tool_call>{"name": "now", "arguments": {}} and text',
        "and text",
        calls=(("now", "{}"),),
    ),
    Sample(
        "llama3",
        "llama3",
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}<|eom_id|>',
        calls=(_PARIS, ("now", "{}")),
    ),
    Sample(
        "llama3 without its marker",
        "llama3",
        '{"type": "function", "name": "weather", "parameters": {"city": "Paris"}}',
        calls=(_PARIS,),
    ),
    Sample(
        "llama3, an object of an answer",
        "llama3",
        '{"name": "absent", "parameters": {"a": 1}}',
        '{"name": "absent", "parameters": {"a": 1}}',
    ),
    Sample(
        "phi4",
        "phi4",
        'functools[{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
        calls=(_PARIS, ("now", "{}")),
    ),
    Sample("the word functools", "phi4", "use functools.partial", "use functools.partial"),
    Sample(
        "phi4, the second of an array is none",
        "phi4",
        'functools[{"name": "now", "arguments": {}}, 7]',
        ", 7]",
        calls=(("now", "{}"),),
    ),
    Sample(
        "mistral",
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}, "id": "x"}]</s>',
        calls=(_PARIS, ("now", "{}")),
    ),
    Sample(
        "mistral without its marker",
        "mistral",
        '[{"name": "weather", "arguments": {"city": "Paris"}}]',
        calls=(_PARIS,),
    ),
    Sample("mistral, a list", "mistral", '[{"name": "x", "arguments": {}}]', '[{"name": "x", "arguments": {}}]'),
    Sample(
        "devstral",
        "devstral",
        'Well. [TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}[TOOL_CALLS]now{"a": 1}</s>',
        "Well.",
        calls=(_PARIS, ("now", "{}"), ("now", '{"a": 1}')),
    ),
    Sample("devstral, no name", "devstral", "[TOOL_CALLS] two words[ARGS]{}", "[TOOL_CALLS] two words[ARGS]{}"),
    Sample(
        "generic",
        "generic",
        'Sure: { "tool_calls": [{"name": "weather", "arguments": {"city": "Paris"}, "id": "1"}, {"name": "now", "arguments": {}}] }',
        "Sure:",
        calls=(_PARIS, ("now", "{}")),
    ),
    Sample("generic, other objects", "generic", 'x = {"tool": {"tool_calls": []}}', 'x = {"tool": {"tool_calls": []}}'),
    Sample(
        "gptoss",
        "gptoss",
        "<|channel|>analysis<|message|>Where?<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        "I look.",
        "Where?",
        calls=(_PARIS,),
        reasoning="gptoss",
    ),
    Sample(
        "gptoss, an answer",
        "gptoss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is a < b.<|return|>",
        "It is a < b.",
        "Hm.",
        reasoning="auto",
    ),
    Sample(
        "gptoss, a recipient before its channel, and no arguments",
        "gptoss",
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|><|call|>",
        calls=(("now", "{}"),),
        reasoning="auto",
    ),
    Sample("gptoss, JSON without a channel", "gptoss", '{"a": [1, 2]}', '{"a": [1, 2]}', reasoning="auto"),
    Sample("gptoss, a header that is cut", "gptoss", "<|channel|>ana", "<|channel|>ana", reasoning="auto"),
    Sample(
        "qwen3coder",
        "qwen3coder",
        'I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis "x"\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
        "<parameter=exact>True</parameter>\n</function>\n</tool_call>\n<function=now></function>",
        "I look.",
        calls=(("weather", '{"city": "Paris \\"x\\"\\n", "days": 3, "exact": true}'), ("now", "{}")),
    ),
    Sample(
        "qwen3coder, types",
        "qwen3coder",
        '<tool_call><function=write><parameter=text>42</parameter><parameter=tags>[1, "a"]</parameter><parameter=size>None'
        "</parameter><parameter=other>[1,</parameter><parameter=more>1.50</parameter></function></tool_call>",
        calls=(("write", '{"text": "42", "tags": [1, "a"], "size": null, "other": "[1,", "more": 1.50}'),),
    ),
    Sample(
        "qwen3coder, cut in a text",
        "qwen3coder",
        "<tool_call><function=write><parameter=text>half a </para",
        calls=(("write", '{"text": "half a </para'),),
    ),
    Sample(
        "qwen3coder, a word between parameters",
        "qwen3coder",
        "<tool_call><function=now>\noops</function>",
        "oops</function>",
        calls=(("now", "{}"),),
    ),
    Sample("qwen3coder, no function", "qwen3coder", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>"),
    Sample(
        "minicpm5",
        "minicpm5",
        '<think>hm</think><function name="weather"><param name="city">Paris</param><param name="days">3</param></function>'
        '<function name="now"></function> ok',
        "ok",
        "hm",
        calls=(("weather", '{"city": "Paris", "days": 3}'), ("now", "{}")),
        reasoning="minicpm5",
    ),
    Sample(
        "lfm2",
        "lfm2",
        "Wait. <|tool_call_start|>[weather(city=\"Paris, 'x'\", days=3, exact=True), now()]<|tool_call_end|>So.<|im_end|>",
        "Wait.So.",
        calls=(("weather", '{"city": "Paris, \'x\'", "days": 3, "exact": true}'), ("now", "{}")),
    ),
    Sample(
        "lfm2, nested values",
        "lfm2",
        "<think>a</think><|tool_call_start|>[write(text='a\\n\\'\\u00e9', tags=['x', {'k': (1, -2.5)}], size=null)]<|tool_call_end|>",
        thought="a",
        calls=(("write", '{"text": "a\\n\'é", "tags": ["x", {"k": [1, -2.5]}], "size": null}'),),
        reasoning="lfm2",
    ),
    Sample(
        "lfm2, code that is no call",
        "lfm2",
        "<|tool_call_start|>[weather(open('x').read())]<|tool_call_end|>",
        "<|tool_call_start|>[weather(open('x').read())]<|tool_call_end|>",
    ),
    Sample(
        "gemma4",
        "gemma4",
        '<|channel>thought\nHm.<channel|>Well. <|tool_call>call:weather{city:<|"|>Paris, {x}<|"|>,days:3}call:now{}<tool_call|><turn|>',
        "Well.",
        "Hm.",
        calls=(("weather", '{"city": "Paris, {x}", "days": 3}'), ("now", "{}")),
        reasoning="gemma4",
    ),
    Sample(
        "gemma4, nested values",
        "gemma4",
        '<|tool_call>call:write{tags:[<|"|>G<|"|>,{a:true,<|"|>b<|"|>:null}],text:bare word,size:-1.5}<tool_call|>',
        calls=(("write", '{"tags": ["G", {"a": true, "b": null}], "text": "bare word", "size": -1.5}'),),
    ),
    Sample("gemma4, no call", "gemma4", "<|tool_call>hello{}", "<|tool_call>hello{}"),
    Sample(
        "onyx",
        "onyx",
        " to=self<|message|>I look.<|eom|><|start|>assistant to=weather<|message|><atem:function_calls>\n"
        '<atem:invoke name="weather">\n<atem:parameter name="city">Paris</atem:parameter>\n<atem:parameter name="days">3'
        "</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>",
        thought="I look.",
        calls=(("weather", '{"city": "Paris", "days": 3}'),),
        reasoning="onyx",
    ),
    Sample("onyx, an answer", "onyx", " to=user<|message|>Mail to=admin.<|eot|>", "Mail to=admin.", reasoning="auto"),
    Sample("onyx, an answer without a header", "onyx", "Mail to=admin.<|eot|>", "Mail to=admin.", reasoning="auto"),
    Sample(
        "deepseek",
        "deepseek",
        "<think>hm</think>" + _DEEP.format('function<｜tool▁sep｜>weather\n```json\n{"city": "Paris"}\n```'),
        thought="hm",
        calls=(_PARIS,),
        reasoning="deepseek",
    ),
    Sample("deepseek, newer", "deepseek", "So. " + _DEEP.format("now<｜tool▁sep｜>{}"), "So.", calls=(("now", "{}"),)),
    Sample(
        "granite 3",
        "granite",
        'Well. <|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]<|end_of_text|>',
        "Well.",
        calls=(_PARIS, ("now", "{}")),
    ),
    Sample(
        "granite 4, with reasoning",
        "granite",
        '<think>hm</think>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        thought="hm",
        calls=(_PARIS, ("now", "{}")),
        reasoning="granite",
    ),
    Sample(
        "granite 20b",
        "granite",
        '<function_call> {"name": "weather", "arguments": {"city": "Paris"}} <function_call> {"name": "now"}',
        calls=(_PARIS, ("now", "{}")),
    ),
    Sample(
        "granite, an answer in markers",
        "none",
        "<think>a <response> b</think>\n<response>c <b>d</b>\n</response>",
        "c <b>d</b>",
        "a <response> b",
        reasoning="granite",
    ),
    Sample(
        "granite, markers without reasoning",
        "none",
        "<response>c</response>",
        "<response>c</response>",
        reasoning="granite",
    ),
    Sample(
        "granite, reasoning in words",
        "granite",
        "Here is my thought process:\nHere we go.\n\nHere is my response:\nHello.",
        "Hello.",
        "Here we go.",
        reasoning="granite",
    ),
    Sample(
        "granite, reasoning in other words",
        "granite",
        "Here's my thought process: a. Here's my response: b.",
        "b.",
        "a.",
        reasoning="granite",
    ),
    Sample("granite, other words", "granite", "Here is my thought: a", "Here is my thought: a", reasoning="granite"),
    Sample(
        "kimi_k2",
        "kimi_k2",
        "<think>hm</think>Well.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
        "<|tool_calls_section_end|><|im_end|>",
        "Well.",
        "hm",
        calls=(_PARIS, ("now", "{}")),
        reasoning="qwen3",
        ids=("functions.weather:0", "functions.now:1"),
    ),
    Sample(
        "kimi_k2, a name without a number",
        "kimi_k2",
        "<|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|>",
        calls=(("now", "{}"),),
    ),
    Sample(
        "kimi_k2, no name",
        "kimi_k2",
        "<|tool_call_begin|>two words<|tool_call_argument_begin|>{}",
        "<|tool_call_begin|>two words<|tool_call_argument_begin|>{}",
    ),
    Sample(
        "nemotron",
        "nemotron",
        '<think>hm</think>\n<TOOLCALL>[{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]</TOOLCALL>',
        thought="hm",
        calls=(_PARIS, ("now", "{}")),
        reasoning="qwen3",
    ),
    Sample(
        "nemotron, small",
        "nemotron",
        'So: <toolcall> {"name": "weather", "arguments": {"city": "Paris"}} </toolcall>',
        "So:",
        calls=(_PARIS,),
    ),
    Sample(
        "nemotron, as in Python",
        "nemotron",
        '<TOOLCALL>[weather(city="Paris"), now()]</TOOLCALL>',
        calls=(_PARIS, ("now", "{}")),
    ),
    Sample("nemotron, no call", "nemotron", "<TOOLCALL>[1]</TOOLCALL>", "<TOOLCALL>[1]</TOOLCALL>"),
    Sample(
        "llama4_pythonic",
        "llama4_pythonic",
        '<|python_start|>[weather(city="Paris"), write(text="a, b", tags=["x"], size=None), now()]<|python_end|><|eom|>',
        calls=(_PARIS, ("write", '{"text": "a, b", "tags": ["x"], "size": null}'), ("now", "{}")),
    ),
    Sample("llama4_pythonic without its marker", "llama4_pythonic", '[weather(city="Paris")]<|eot|>', calls=(_PARIS,)),
    Sample(
        "llama4_pythonic after text",
        "llama4_pythonic",
        'I look [here](http://x).\n[weather(city="Paris"), now()]',
        "I look [here](http://x).",
        calls=(_PARIS, ("now", "{}")),
    ),
    Sample(
        "llama4_pythonic, JSON",
        "llama4_pythonic",
        '{"name": "weather", "parameters": {"city": "Paris"}}',
        calls=(_PARIS,),
    ),
    Sample("llama4_pythonic, no call", "llama4_pythonic", "[absent(a=1)] [1, 2]", "[absent(a=1)] [1, 2]"),
    Sample(
        "glm45",
        "glm45",
        "<think>hm</think>\nWell.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call><|observation|>",
        "Well.",
        "hm",
        calls=(("weather", '{"city": "Paris", "days": 3}'), ("now", "{}")),
        reasoning="qwen3",
    ),
    Sample(
        "glm45, values as they are",
        "glm45",
        "<tool_call>write<arg_key>text</arg_key><arg_value>\n<![CDATA[ 42 ]]> </arg_value>"
        '<arg_key>tags</arg_key><arg_value>["a", 1]</arg_value></tool_call>',
        calls=(("write", '{"text": "\\n<![CDATA[ 42 ]]> ", "tags": ["a", 1]}'),),
    ),
    Sample("glm45, no call", "glm45", "<tool_call>two words</tool_call>", "<tool_call>two words</tool_call>"),
    Sample("letters of all planes", "hermes3", "é 日本 🚀 <tool_cal é", "é 日本 🚀 <tool_cal é", reasoning="qwen3"),
)
