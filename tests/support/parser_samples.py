# ruff: noqa: E501, RUF001 -- texts are written as models write them
"""Texts as models write them, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Sample:
    """A text, its parsers, and what comes of it; calls are names and arguments as they are written."""

    name: str
    tools: str
    reasoning: str
    written: str
    content: str = ""
    thought: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    opened: bool = False


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
    Sample("plain text", "none", "none", " as it is <tool_call>\n ", " as it is <tool_call>\n "),
    Sample("thought, then text", "none", "qwen3", "<think>\nwhy?\n</think>\n\nso.\n", "so.\n", "why?"),
    Sample("thought that the prompt began", "none", "deepseek", "why?\n</think>\nso.", "so.", "why?", opened=True),
    Sample("thought without an end", "hermes3", "qwen3", "<think>why? <tool_call>", "", "why? <tool_call>"),
    Sample("a marker that comes too late", "none", "qwen3", "say <think>x</think>", "say <think>x</think>"),
    Sample("no thought", "none", "qwen3", "<thing> </think>", "<thing> </think>"),
    Sample(
        "hermes3",
        "hermes3",
        "qwen3",
        '<think>hm</think>\nLet me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>{"name":"now","arguments":{}}</tool_call> done',
        "Let me look.done",
        "hm",
        (_PARIS, ("now", "{}")),
    ),
    Sample(
        "arguments with brackets and tags in texts",
        "hermes3",
        "none",
        '<tool_call>{"name": "write", "arguments": {"text": "}]\\"</tool_call>\\\\", "tags": [{"a": "{"}]}}</tool_call>',
        calls=(("write", '{"text": "}]\\"</tool_call>\\\\", "tags": [{"a": "{"}]}'),),
    ),
    Sample(
        "arguments before the name",
        "hermes3",
        "none",
        '<tool_call>{"id": 7, "arguments": {"city": "Paris"}, "name": "weather"}</tool_call>',
        calls=(_PARIS,),
    ),
    Sample(
        "arguments as a text, as null, and none",
        "hermes3",
        "none",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>'
        '<tool_call>{"name": "now", "arguments": null}</tool_call><tool_call>{"name": "now"}</tool_call>',
        calls=(_PARIS, ("now", "{}"), ("now", "{}")),
    ),
    Sample(
        "an object that is no call, and one that is",
        "hermes3",
        "none",
        'see <tool_call>{"nam": 1}</tool_call> and <tool_call>[1]<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        'see <tool_call>{"nam": 1}</tool_call> and <tool_call>[1]',
        calls=(("now", "{}"),),
    ),
    Sample(
        "a call that is cut before its name",
        "hermes3",
        "none",
        'a <tool_call>\n{"name": "wea',
        'a <tool_call>\n{"name": "wea',
    ),
    Sample(
        "a call that is cut in its arguments",
        "hermes3",
        "none",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Pa',
        calls=(("weather", '{"city": "Pa'),),
    ),
    Sample(
        "a call without its closing tag",
        "hermes3",
        "none",
        '<tool_call>{"name": "now", "arguments": {}} and text',
        "and text",
        calls=(("now", "{}"),),
    ),
    Sample(
        "llama3",
        "llama3",
        "none",
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}<|eom_id|>',
        calls=(_PARIS, ("now", "{}")),
    ),
    Sample(
        "llama3 without its marker",
        "llama3",
        "none",
        '{"type": "function", "name": "weather", "parameters": {"city": "Paris"}}',
        calls=(_PARIS,),
    ),
    Sample(
        "llama3, an object of an answer",
        "llama3",
        "none",
        '{"name": "nobody", "parameters": {"a": 1}}',
        '{"name": "nobody", "parameters": {"a": 1}}',
    ),
    Sample(
        "phi4",
        "phi4",
        "none",
        'functools[{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
        calls=(_PARIS, ("now", "{}")),
    ),
    Sample("the word functools", "phi4", "none", "use functools.partial", "use functools.partial"),
    Sample(
        "phi4, the second of an array is none",
        "phi4",
        "none",
        'functools[{"name": "now", "arguments": {}}, 7]',
        ", 7]",
        calls=(("now", "{}"),),
    ),
    Sample(
        "mistral",
        "mistral",
        "none",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}, "id": "x"}]</s>',
        calls=(_PARIS, ("now", "{}")),
    ),
    Sample(
        "mistral without its marker",
        "mistral",
        "none",
        '[{"name": "weather", "arguments": {"city": "Paris"}}]',
        calls=(_PARIS,),
    ),
    Sample(
        "mistral, a list", "mistral", "none", '[{"name": "x", "arguments": {}}]', '[{"name": "x", "arguments": {}}]'
    ),
    Sample(
        "devstral",
        "devstral",
        "none",
        'Well. [TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}[TOOL_CALLS]now{"a": 1}</s>',
        "Well.",
        calls=(_PARIS, ("now", "{}"), ("now", '{"a": 1}')),
    ),
    Sample("devstral, no name", "devstral", "none", "[TOOL_CALLS] two words[ARGS]{}", "[TOOL_CALLS] two words[ARGS]{}"),
    Sample(
        "generic",
        "generic",
        "none",
        'Sure: { "tool_calls": [{"name": "weather", "arguments": {"city": "Paris"}, "id": "1"}, {"name": "now", "arguments": {}}] }',
        "Sure:",
        calls=(_PARIS, ("now", "{}")),
    ),
    Sample(
        "generic, other objects",
        "generic",
        "none",
        'x = {"tool": {"tool_calls": []}}',
        'x = {"tool": {"tool_calls": []}}',
    ),
    Sample(
        "gptoss",
        "gptoss",
        "gptoss",
        "<|channel|>analysis<|message|>Where?<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        "I look.",
        "Where?",
        (_PARIS,),
    ),
    Sample(
        "gptoss, an answer",
        "gptoss",
        "auto",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is a < b.<|return|>",
        "It is a < b.",
        "Hm.",
    ),
    Sample(
        "gptoss, a recipient before its channel, and no arguments",
        "gptoss",
        "auto",
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|><|call|>",
        calls=(("now", "{}"),),
    ),
    Sample("gptoss, JSON without a channel", "gptoss", "auto", '{"a": [1, 2]}', '{"a": [1, 2]}'),
    Sample("gptoss, a header that is cut", "gptoss", "auto", "<|channel|>ana", "<|channel|>ana"),
    Sample(
        "qwen3coder",
        "qwen3coder",
        "none",
        'I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis "x"\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
        "<parameter=exact>True</parameter>\n</function>\n</tool_call>\n<function=now></function>",
        "I look.",
        calls=(("weather", '{"city": "Paris \\"x\\"\\n", "days": 3, "exact": true}'), ("now", "{}")),
    ),
    Sample(
        "qwen3coder, types",
        "qwen3coder",
        "none",
        '<tool_call><function=write><parameter=text>42</parameter><parameter=tags>[1, "a"]</parameter><parameter=size>None'
        "</parameter><parameter=other>[1,</parameter><parameter=more>1.50</parameter></function></tool_call>",
        calls=(("write", '{"text": "42", "tags": [1, "a"], "size": null, "other": "[1,", "more": 1.50}'),),
    ),
    Sample(
        "qwen3coder, cut in a text",
        "qwen3coder",
        "none",
        "<tool_call><function=write><parameter=text>half a </para",
        calls=(("write", '{"text": "half a </para'),),
    ),
    Sample(
        "qwen3coder, a word between parameters",
        "qwen3coder",
        "none",
        "<tool_call><function=now>\noops</function>",
        "oops</function>",
        calls=(("now", "{}"),),
    ),
    Sample("qwen3coder, no function", "qwen3coder", "none", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>"),
    Sample(
        "minicpm5",
        "minicpm5",
        "minicpm5",
        '<think>hm</think><function name="weather"><param name="city">Paris</param><param name="days">3</param></function>'
        '<function name="now"></function> ok',
        "ok",
        "hm",
        (("weather", '{"city": "Paris", "days": 3}'), ("now", "{}")),
    ),
    Sample(
        "lfm2",
        "lfm2",
        "none",
        "Wait. <|tool_call_start|>[weather(city=\"Paris, 'x'\", days=3, exact=True), now()]<|tool_call_end|>So.<|im_end|>",
        "Wait.So.",
        calls=(("weather", '{"city": "Paris, \'x\'", "days": 3, "exact": true}'), ("now", "{}")),
    ),
    Sample(
        "lfm2, nested values",
        "lfm2",
        "lfm2",
        "<think>a</think><|tool_call_start|>[write(text='a\\n\\'\\u00e9', tags=['x', {'k': (1, -2.5)}], size=null)]<|tool_call_end|>",
        thought="a",
        calls=(("write", '{"text": "a\\n\'é", "tags": ["x", {"k": [1, -2.5]}], "size": null}'),),
    ),
    Sample(
        "lfm2, code that is no call",
        "lfm2",
        "none",
        "<|tool_call_start|>[weather(open('x').read())]<|tool_call_end|>",
        "<|tool_call_start|>[weather(open('x').read())]<|tool_call_end|>",
    ),
    Sample(
        "gemma4",
        "gemma4",
        "gemma4",
        '<|channel>thought\nHm.<channel|>Well. <|tool_call>call:weather{city:<|"|>Paris, {x}<|"|>,days:3}call:now{}<tool_call|><turn|>',
        "Well.",
        "Hm.",
        (("weather", '{"city": "Paris, {x}", "days": 3}'), ("now", "{}")),
    ),
    Sample(
        "gemma4, nested values",
        "gemma4",
        "none",
        '<|tool_call>call:write{tags:[<|"|>G<|"|>,{a:true,<|"|>b<|"|>:null}],text:bare word,size:-1.5}<tool_call|>',
        calls=(("write", '{"tags": ["G", {"a": true, "b": null}], "text": "bare word", "size": -1.5}'),),
    ),
    Sample("gemma4, no call", "gemma4", "none", "<|tool_call>hello{}", "<|tool_call>hello{}"),
    Sample(
        "onyx",
        "onyx",
        "onyx",
        " to=self<|message|>I look.<|eom|><|start|>assistant to=weather<|message|><atem:function_calls>\n"
        '<atem:invoke name="weather">\n<atem:parameter name="city">Paris</atem:parameter>\n<atem:parameter name="days">3'
        "</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>",
        thought="I look.",
        calls=(("weather", '{"city": "Paris", "days": 3}'),),
    ),
    Sample("onyx, an answer", "onyx", "auto", " to=user<|message|>Mail to=admin.<|eot|>", "Mail to=admin."),
    Sample("onyx, an answer without a header", "onyx", "auto", "Mail to=admin.<|eot|>", "Mail to=admin."),
    Sample(
        "deepseek",
        "deepseek",
        "deepseek",
        "<think>hm</think>" + _DEEP.format('function<｜tool▁sep｜>weather\n```json\n{"city": "Paris"}\n```'),
        thought="hm",
        calls=(_PARIS,),
    ),
    Sample(
        "deepseek, newer",
        "deepseek",
        "none",
        "So. " + _DEEP.format("now<｜tool▁sep｜>{}"),
        "So.",
        calls=(("now", "{}"),),
    ),
    Sample("letters of all planes", "hermes3", "qwen3", "é 日本 🚀 <tool_cal é", "é 日本 🚀 <tool_cal é"),
)
