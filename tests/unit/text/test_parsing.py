from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ovmstrio.core.errors import ConfigError
from ovmstrio.core.generation import Conversation, Finish, GenerationRequest, Grammar, GrammarKind
from ovmstrio.core.tracing import current_span
from ovmstrio.telemetry.recent_traces import RecentTraces
from ovmstrio.telemetry.spans import RecordedSpan
from ovmstrio.text.engine_client import GenerationSpan, OutputChunk
from ovmstrio.text.parsing import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    StreamingParser,
    make_parser,
    opens_reasoning,
    select_parsers,
)
from ovmstrio.text.text_model import OutputParsing, OutputReader
from tests.support.examples import examples
from tests.support.malformed_samples import MALFORMED, RECOVERED
from tests.support.parser_samples import SAMPLES, TOOLS, Sample
from tests.support.scripted_services import text_spec

_PAIRS = sorted({(sample.tools, sample.reasoning) for sample in SAMPLES})


@dataclass
class _Joined:
    content: str = ""
    thought: str = ""
    calls: list[list[str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)


def _joined(parser: StreamingParser, pieces: Iterable[str]) -> _Joined:
    joined = _Joined()
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    for delta in (*deltas, *parser.finish()):
        joined.content += delta.text
        joined.thought += delta.reasoning
        for call in delta.calls:
            if call.name:
                assert call.index == len(joined.calls)
                joined.calls.append([call.name, ""])
                joined.ids.append(call.id)
            joined.calls[call.index][1] += call.arguments
    return joined


def _read(sample: Sample, pieces: Sequence[str]) -> _Joined:
    return _joined(make_parser(sample.tools, sample.reasoning, tools=TOOLS, opened=sample.opened), pieces)


def _expect(sample: Sample, found: _Joined) -> None:
    assert (found.content, found.thought, found.calls) == (
        sample.content,
        sample.thought,
        [list(c) for c in sample.calls],
    )


def _chunked(text: str) -> list[list[str]]:
    return [[text[at : at + size] for at in range(0, len(text), size)] for size in (1, 3, 7)]


@pytest.mark.parametrize("sample", [*SAMPLES, *RECOVERED], ids=lambda sample: sample.name)
def test_sample_has_the_same_parts_in_any_pieces(sample: Sample) -> None:
    text = sample.written
    found = _read(sample, [text])
    _expect(sample, found)
    assert len(set(found.ids)) == len(found.ids)
    if sample.ids:
        assert tuple(found.ids) == sample.ids
    else:
        assert all(len(one) == 9 and one.isalnum() for one in found.ids)
    for pieces in (*_chunked(text), *([text[:at], text[at:]] for at in range(len(text) + 1))):
        _expect(sample, _read(sample, pieces))


@pytest.mark.parametrize(("tools", "text", "calls"), [row[1:] for row in MALFORMED], ids=[row[0] for row in MALFORMED])
def test_malformed_call_has_the_same_meaning_in_any_pieces(
    tools: str, text: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    for pieces in ([text], *_chunked(text)):
        found = _joined(make_parser(tools, "none", tools=TOOLS), pieces)
        assert [(name, json.loads(arguments)) for name, arguments in found.calls] == calls
        assert found.content == found.thought == ""


def test_every_family_has_malformed_calls() -> None:
    assert {row[1] for row in MALFORMED} | {"none", "auto", "devstral"} == set(TOOL_PARSERS)


@settings(max_examples=examples(100), deadline=None)
@given(row=st.sampled_from(MALFORMED), data=st.data())
def test_damaged_call_has_the_same_parts_in_any_pieces(row: tuple[str, str, str, Any], data: st.DataObject) -> None:
    _, tools, text, _ = row
    start, end = sorted(data.draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
    text = text[:start] + data.draw(st.sampled_from(["", '"', "'", "}", ",", " x", text[end:]])) + text[end:]
    whole = _joined(make_parser(tools, "none", tools=TOOLS), [text])
    for pieces in _chunked(text):
        parted = _joined(make_parser(tools, "none", tools=TOOLS), pieces)
        assert (parted.content, parted.thought, parted.calls) == (whole.content, whole.thought, whole.calls)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=9,
)
_OBJECTS = st.dictionaries(st.text(max_size=9), _VALUES, max_size=4)


@settings(max_examples=examples(100), deadline=None)
@given(arguments=_OBJECTS, indent=st.sampled_from([None, 2]), size=st.integers(1, 9))
@pytest.mark.parametrize(
    ("tools", "form"),
    [
        ("hermes3", '<tool_call>{{"name": "now", "arguments": {}}}</tool_call>'),
        ("phi4", 'functools[{{"name": "now", "arguments": {}}}]'),
        ("mistral", "[TOOL_CALLS]now[ARGS]{}"),
        ("gptoss", "<|channel|>commentary to=functions.now<|message|>{}<|call|>"),
        ("granite", '<|tool_call|>[{{"name": "now", "arguments": {}}}]'),
        ("kimi_k2", "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("nemotron", '<TOOLCALL>[{{"name": "now", "arguments": {}}}]</TOOLCALL>'),
    ],
)
def test_valid_json_is_unchanged(
    tools: str, form: str, arguments: dict[str, Any], indent: int | None, size: int
) -> None:
    written = json.dumps(arguments, indent=indent)
    text = form.format(written)
    found = _joined(make_parser(tools, "none", tools=TOOLS), [text[at : at + size] for at in range(0, len(text), size)])
    assert (found.content, found.calls) == ("", [["now", written]])


@settings(max_examples=examples(100), deadline=None)
@given(arguments=_OBJECTS)
@pytest.mark.parametrize(
    ("tools", "form"),
    [
        ("hermes3", "<tool_call>{{'name': 'now', 'arguments': {}}}</tool_call>"),
        ("lfm2", "<|tool_call_start|>[now(all={})]<|tool_call_end|>"),
        ("llama4_pythonic", "<|python_start|>[now(all={})]<|python_end|>"),
        ("gemma4", "<|tool_call>call:now{}<tool_call|>"),
    ],
)
def test_json_in_other_notations_has_the_same_values(tools: str, form: str, arguments: dict[str, Any]) -> None:
    written = form.format(json.dumps(arguments) if tools == "gemma4" else repr(arguments))
    found = _joined(make_parser(tools, "none", tools=TOOLS), [written])
    (call,) = found.calls
    expected = {"all": arguments} if "all=" in form else arguments
    assert json.loads(call[1]) == expected


@pytest.mark.parametrize("text", ["=SUM(A1)", "unit=cm", "a: 1"])
def test_text_like_an_argument_stays_an_element_of_its_list(text: str) -> None:
    written = f"<|tool_call_start|>[now(all=[1, {text!r}, 2], unit='m')]<|tool_call_end|>"
    found = _joined(make_parser("lfm2", "none", tools=TOOLS), [written])
    assert [json.loads(arguments) for _, arguments in found.calls] == [{"all": [1, text, 2], "unit": "m"}]


_SCHEMA = {
    "type": "object",
    "$defs": {
        "Range": {"type": "object", "properties": {"low": {"type": "integer"}}},
        "Code": {"type": "string"},
        "Level": {"enum": ["1", "2"], "title": "Level"},
        "Loop": {"$ref": "#/$defs/Loop"},
    },
}


@pytest.mark.parametrize(
    ("schema", "written", "expected"),
    [
        ({"$ref": "#/$defs/Range"}, '{"low": 1}', {"low": 1}),
        ({"$ref": "#/$defs/Range"}, "{'low': 1, 'on': True}", {"low": 1, "on": True}),
        ({"$ref": "#/$defs/Code"}, "42", "42"),
        ({"$ref": "#/$defs/Level"}, "1", "1"),
        ({"$ref": "#/$defs/Missing"}, "1", 1),
        ({"$ref": "#/$defs/Loop"}, "1", 1),
        ({"allOf": [{"$ref": "#/$defs/Code"}], "description": "a"}, "true", "true"),
        ({"allOf": [{"$ref": "#/$defs/Range"}, {"properties": {"a": {}}}]}, '{"a": 2}', {"a": 2}),
        ({"allOf": [{"type": "number"}, {"type": ["integer", "null"]}]}, "2", 2),
        ({"anyOf": [{"$ref": "#/$defs/Range"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"$ref": "#/$defs/Range"}, {"type": "null"}]}, "{'low': 2,}", {"low": 2}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12", "12"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12", 12),
        ({"oneOf": [{"const": "7"}, {"const": "8"}]}, "7", "7"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": ["a", None]}, "None", None),
        ({"const": "3"}, "3", "3"),
        ({"type": "integer"}, "3.0", 3),
        ({"type": "number"}, "3", 3),
        ({"type": "number"}, "3.5", 3.5),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "int"}, "3", 3),
        ({"properties": {"a": {}}}, "{'a': 1}", {"a": 1}),
        ({"items": {"type": "integer"}}, "[1, 2", [1, 2]),
        ({"pattern": "[0-9]+"}, "123", "123"),
        ({}, "123", 123),
        (True, "123", 123),
    ],
)
@pytest.mark.parametrize(
    ("tools", "form"),
    [
        ("qwen3coder", "<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>"),
        ("minicpm5", '<function name="f"><param name="x">{}</param></function>'),
        ("glm45", "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
        (
            "onyx",
            '<atem:function_calls><atem:invoke name="f"><atem:parameter name="x">{}</atem:parameter></atem:invoke>',
        ),
    ],
)
def test_value_in_a_tag_has_the_type_of_its_schema(
    tools: str, form: str, schema: Any, written: str, expected: Any
) -> None:
    parameters = {**_SCHEMA, "properties": {"x": schema}}
    (call,) = _joined(
        make_parser(tools, "none", tools=[{"function": {"name": "f", "parameters": parameters}}]),
        [form.format(written)],
    ).calls
    assert json.loads(call[1]) == {"x": expected}


def test_properties_of_referenced_parameters_have_types() -> None:
    parameters = {"$ref": "#/$defs/A", "$defs": {"A": {"allOf": [{"properties": {"x": {"type": "string"}}}]}}}
    tool = {"function": {"name": "f", "parameters": parameters}}
    text = "<function=f><parameter=x>42</parameter></function>"
    (call,) = _joined(make_parser("qwen3coder", "none", tools=[tool]), [text]).calls
    assert json.loads(call[1]) == {"x": "42"}


_FRAGMENTS = sorted(
    {part for sample in SAMPLES for part in sample.written.replace("<", "\0<").replace("{", "\0{").split("\0")}
    | set('{}[]()"\\,:<|\n ')
)
_TEXTS = st.lists(st.sampled_from(_FRAGMENTS) | st.text(max_size=5), max_size=12).map("".join)


@settings(max_examples=examples(120), deadline=None)
@given(text=_TEXTS, cuts=st.lists(st.integers(0, 400), max_size=12), pair=st.sampled_from(_PAIRS), opened=st.booleans())
def test_any_text_has_the_same_parts_in_any_pieces(
    text: str, cuts: list[int], pair: tuple[str, str], *, opened: bool
) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(places)]
    whole, parted = (
        _joined(make_parser(*pair, tools=TOOLS, opened=opened), given_pieces) for given_pieces in ([text], pieces)
    )
    assert (parted.content, parted.thought, parted.calls) == (whole.content, whole.thought, whole.calls)


_DROPPED = re.compile(
    r"<\|(?:im_end|eom_id|eot_id|tool_response|end|return|call|eom|eot|end_of_text|user|observation|endoftext"
    r"|tool_calls?_section_(?:begin|end))\|?>|</s>|<turn\|>|<SPECIAL_12>"
    r"|<\uff5c(?:tool▁calls▁(?:begin|end)|end▁of▁sentence)\uff5c>"
)
_WHOLE = ("none", "qwen3coder", "minicpm5", "lfm2", "gemma4")


def _letters(text: str) -> str:
    return "".join(text.split())


@settings(max_examples=examples(120), deadline=None)
@given(text=_TEXTS, pair=st.sampled_from(_PAIRS))
def test_text_without_calls_and_reasoning_is_content(text: str, pair: tuple[str, str]) -> None:
    found = _joined(make_parser(*pair, tools=TOOLS), [text])
    if not found.calls and not found.thought and "<|message|>" not in text and "</think>" not in text:
        assert _letters(_DROPPED.sub("", found.content)) == _letters(_DROPPED.sub("", text))


@settings(max_examples=examples(120), deadline=None)
@given(
    parts=st.lists(st.sampled_from(_FRAGMENTS) | st.integers(100, 999).map("w{}".format), max_size=14),
    tools=st.sampled_from(_WHOLE),
)
def test_invalid_calls_lose_no_word(parts: list[str], tools: str) -> None:
    found = _joined(make_parser(tools, "none", tools=TOOLS), [" ".join(parts)])
    output = " ".join([found.content, *(" ".join(call) for call in found.calls)])
    words = [part for part in parts if part[:1] == "w" and part[1:].isdecimal()]
    assert not [word for word in words if output.count(word) < words.count(word)]


def test_text_and_reasoning_stream_up_to_a_possible_marker() -> None:
    parser = make_parser("hermes3", "none")
    assert [delta.text for delta in parser.feed("a < b, see <tool_c")] == ["a < b, see"]
    assert [delta.text for delta in parser.feed("orn>")] == [" <tool_corn>"]
    parser = make_parser("none", "qwen3")
    assert parser.feed("<think>\n") == []
    assert [delta.reasoning for delta in parser.feed("one two </th")] == ["one two"]
    assert [delta.reasoning for delta in parser.feed("ree")] == [" </three"]


def test_arguments_stream_in_json_and_in_tags() -> None:
    parser = make_parser("hermes3", "none")
    assert parser.feed('<tool_call>{"name": "write"') == []
    (begun,) = parser.feed(', "arguments": {"text": "once')
    assert (begun.calls[0].name, begun.calls[0].arguments) == ("write", '{"text": "once')
    assert [delta.calls[0].arguments for delta in parser.feed(" upon")] == [" upon"]
    tagged = make_parser("qwen3coder", "none", tools=TOOLS)
    tagged.feed("<tool_call><function=write><parameter=text>once")
    assert [delta.calls[0].arguments for delta in tagged.feed(' "upon"')] == [' \\"upon\\"']


@pytest.mark.parametrize(
    "unit", ['<tool_call>{"a', "functools[", "[TOOL_CALLS]x", '{"tool_calls":[', "<|tool_call_start|>[f(a='\"", "\n"]
)
@pytest.mark.parametrize("tools", [name for name in TOOL_PARSERS if name != "auto"])
def test_long_text_of_incomplete_calls_is_content(tools: str, unit: str) -> None:
    text = unit * (80_000 // len(unit))
    found = _joined(make_parser(tools, "none"), [text[at : at + 500] for at in range(0, len(text), 500)])
    assert _letters(found.content) == _letters(text)


def test_deeply_nested_arguments_are_content() -> None:
    text = f"<|tool_call_start|>[f(a={'[' * 5000}{']' * 5000})]<|tool_call_end|>"
    assert _joined(make_parser("lfm2", "none"), [text]).content == text


@pytest.mark.parametrize(
    ("tools", "reasoning", "message"),
    [
        ("hermse", "none", r"hermes3, llama3.*found \"hermse\"\); did you mean 'hermes3'"),
        ("none", "mistral", r"reasoning_parser.*qwen3, deepseek"),
        ("gptoss", "qwen3", "'gptoss' for both, found 'qwen3'"),
    ],
)
def test_unknown_and_conflicting_parsers_are_refused(tools: str, reasoning: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_parser(tools, reasoning)


@pytest.mark.parametrize(
    ("tools", "reasoning"),
    [*product(TOOL_PARSERS, ["none", "auto"]), *(("auto", reasoning) for reasoning in REASONING_PARSERS)],
)
def test_plain_text_passes_every_parser(tools: str, reasoning: str) -> None:
    assert _joined(make_parser(tools, reasoning), ["plain ", "text"]).content == "plain text"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages }}", ("generic", "none")),
        ("<tool_call> </tool_call>", ("hermes3", "none")),
        ("<tool_call> </tool_call> <think>", ("hermes3", "qwen3")),
        ("<tool_call><function=x><parameter=y></parameter></tool_call><think>", ("qwen3coder", "qwen3")),
        ("<|start|><|channel|>analysis<|message|>", ("gptoss", "gptoss")),
        ("<|start|><|message|><|eom|><|eot|>", ("onyx", "onyx")),
        ("'<|tool_call>call:'", ("gemma4", "gemma4")),
        ('<function name=""><param name="x">', ("minicpm5", "minicpm5")),
        ("<|tool_call_start|>", ("lfm2", "none")),
        ("keep_past_thinking <think>", ("lfm2", "lfm2")),
        ("functools", ("phi4", "none")),
        ("[TOOL_CALLS][ARGS]", ("devstral", "none")),
        ("[AVAILABLE_TOOLS][/AVAILABLE_TOOLS]", ("mistral", "none")),
        ("<|python_tag|>", ("llama3", "none")),
        ("<\uff5ctool▁calls▁begin\uff5c></think>", ("deepseek", "qwen3")),
        ("<|start_of_role|>tools <|tool_call|>", ("granite", "none")),
        ("<|start_of_role|>tools <tool_call></tool_call> <think></think><response>", ("granite", "granite")),
        ("<|start_of_role|>tool_call Here is my thought process: x", ("granite", "granite")),
        ("<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>", ("kimi_k2", "none")),
        ("<TOOLCALL></TOOLCALL> <think>", ("nemotron", "qwen3")),
        ("<toolcall>", ("nemotron", "none")),
        ("<|header_start|> tools <|eot|>", ("llama4_pythonic", "none")),
        ("<tool_call><arg_key></arg_key><arg_value></tool_call> <think>", ("glm45", "qwen3")),
    ],
)
def test_parsers_are_chosen_by_the_template(template: str, expected: tuple[str, str]) -> None:
    assert select_parsers("auto", "auto", template) == expected
    assert select_parsers("gptoss", "none") == ("gptoss", "gptoss")
    assert select_parsers("auto", "onyx") == ("onyx", "onyx")


def test_parsers_have_the_names_of_vllm_too() -> None:
    assert select_parsers("hermes", "deepseek_r1") == ("hermes3", "deepseek")
    assert select_parsers("qwen3_coder", "glm45") == ("qwen3coder", "qwen3")
    assert select_parsers("openai", "none") == ("gptoss", "gptoss")


def test_formats_of_special_tokens_keep_them() -> None:
    asking = {name for name in TOOL_PARSERS if make_parser(name, "auto").keeps_special_tokens}
    assert asking == {
        "llama3",
        "mistral",
        "devstral",
        "gptoss",
        "lfm2",
        "gemma4",
        "onyx",
        "deepseek",
        "phi4",
        "minicpm5",
        "granite",
        "kimi_k2",
        "nemotron",
        "llama4_pythonic",
        "glm45",
    }
    assert make_parser("none", "lfm2").keeps_special_tokens


def test_prompt_that_ends_with_the_marker_begins_with_reasoning() -> None:
    assert opens_reasoning("qwen3", "<|im_start|>assistant\n<think>\n")
    assert not opens_reasoning("qwen3", "<think>\n\n</think>\n\n")
    assert not opens_reasoning("none", "<think>")


_THINKING_TEMPLATE = "{{ messages }}<think>\n{# </think> <tool_call></tool_call> #}"


@pytest.mark.parametrize(
    ("grammar", "text", "parts"),
    [
        (None, "so</think>yes", ("so", "yes")),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array"}'), "[1]", ("", "[1]")),
        (Grammar(GrammarKind.JSON_OBJECT, ""), "{}", ("", "{}")),
        (Grammar(GrammarKind.REGEX, "yes|no"), "yes", ("", "yes")),
        (Grammar(GrammarKind.EBNF, 'root ::= "so" "</think>" "yes"'), "so</think>yes", ("so", "yes")),
        (Grammar(GrammarKind.STRUCTURAL_TAG, '{"format": {"type": "any_text"}}'), "so</think>yes", ("so", "yes")),
    ],
)
def test_grammar_of_an_answer_leaves_no_reasoning(
    tmp_path: Path, grammar: Grammar | None, text: str, parts: tuple[str, str]
) -> None:
    facts = {"chat_template": _THINKING_TEMPLATE, "architectures": []}
    parsing = OutputParsing(text_spec(tmp_path), facts)
    _, reading = parsing.prepare(GenerationRequest(Conversation(({"role": "user", "content": "x"},)), grammar=grammar))
    reading.begin("assistant\n<think>\n")
    reading.feed(OutputChunk(0, [(text, 1)], 1, finish=Finish.STOP))
    pieces = list(iter(reading.next, None))
    assert ("".join(piece.reasoning for piece in pieces), "".join(piece.text for piece in pieces)) == parts


_REASONING = ["<think>", "\n", "hm", ",", "", " so", "\n", "</think>", "\n\n"]
_ANSWER = ["I", " look", ".", " <", " done"]


def _counted(parts: list[str], joined: list[int], reasoning: str, *, opened: bool = False) -> tuple[int, int]:
    reading = OutputReader(Conversation(()), "none", reasoning)
    reading.begin("<think>\n" if opened else "")
    counted = tokens = place = 0
    for number in [*joined, len(parts)]:
        made = OutputChunk(0, parts=[(part, 1) for part in parts[place : place + number]])
        made.tokens = len(made.parts)
        place += number
        if place >= len(parts):
            made.finish = Finish.STOP
        reading.feed(made)
        while (piece := reading.next()) is not None:
            counted += piece.reasoning_tokens
            tokens += piece.tokens
        if made.finish:
            break
    return counted, tokens


@given(st.lists(st.integers(1, 4), max_size=12))
def test_tokens_of_reasoning_include_its_markers_and_blanks(joined: list[int]) -> None:
    parts = _REASONING + _ANSWER
    assert _counted(parts, joined, "qwen3") == (len(_REASONING), len(parts))
    assert _counted(_REASONING[:5], [], "qwen3") == (5, 5)
    assert _counted(parts[1:], joined, "qwen3", opened=True) == (len(_REASONING) - 1, len(parts) - 1)


@given(st.lists(st.integers(1, 4), max_size=12))
def test_text_without_reasoning_has_no_tokens_of_reasoning(joined: list[int]) -> None:
    assert _counted(_ANSWER, joined, "qwen3") == (0, len(_ANSWER))
    assert _counted(["<thin", "g>", *_ANSWER], joined, "qwen3") == (0, len(_ANSWER) + 2)
    assert _counted(_REASONING + _ANSWER, joined, "none") == (0, len(_REASONING + _ANSWER))


@pytest.mark.parametrize("state", ["", "other=1,ovms=steps"])
def test_generation_span_has_phases_and_steps_on_request(state: str) -> None:
    recent = RecentTraces()
    call = RecordedSpan("chat m", [recent], 0xAB, state=state, kind="server")
    with call.as_current():
        assert current_span.get() is call
        text = GenerationSpan(call)
        text.prompted(7, 3)
        for tokens in (1, 2, 0):
            text.came(0, tokens)
        text.end(3, "stop")
    call.end()

    (trace,) = recent.traces()
    names = {span.span_id: span.name for span in trace.spans}
    assert [(span.name, names.get(span.parent_id, "")) for span in trace.spans] == [
        ("queue", "generation"),
        ("prefill", "generation"),
        ("decode", "generation"),
        ("generation", "chat m"),
        ("chat m", ""),
    ]
    generation, root = trace.spans[3:]
    figures = {
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": "stop",
    }
    assert generation.attributes == root.attributes == figures
    steps = [(name, attributes["ovmstrio.tokens"]) for name, _, attributes in generation.events]
    assert steps == ([("step", 1), ("step", 2)] if state else [])


def test_cancelled_generation_is_marked() -> None:
    recent = RecentTraces()
    call = RecordedSpan("chat m", [recent], 0xAB, kind="server")
    GenerationSpan(call).end(0, None)
    call.end()
    (trace,) = recent.traces()
    assert [span.name for span in trace.spans] == ["queue", "generation", "chat m"]
    assert trace.spans[1].attributes["ovmstrio.cancelled"] is True
