"""A text of a model means the same however it is cut into pieces, and nothing of it is lost."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.generation.parsing import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    OutputParser,
    chosen_parsers,
    make_parser,
    opens_reasoning,
)
from tests.support.examples import examples
from tests.support.parser_samples import SAMPLES, TOOLS, Sample

_BY_NAME = [pytest.param(sample, id=sample.name.replace(" ", "_")) for sample in SAMPLES]
_PAIRS = sorted({(sample.tools, sample.reasoning) for sample in SAMPLES})


@dataclass
class _Joined:
    content: str = ""
    thought: str = ""
    calls: list[list[str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)


def _joined(parser: OutputParser, pieces: Iterable[str]) -> _Joined:
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


@pytest.mark.parametrize("sample", _BY_NAME)
def test_a_text_is_taken_apart_as_its_format_says(sample: Sample) -> None:
    """Content, reasoning and calls, each with an identifier of its own."""
    found = _read(sample, [sample.written])
    _expect(sample, found)
    assert len(set(found.ids)) == len(found.ids)
    assert all(len(one) == 9 and one.isalnum() for one in found.ids)


@pytest.mark.parametrize("sample", _BY_NAME)
def test_two_pieces_mean_what_the_whole_means_wherever_they_are_cut(sample: Sample) -> None:
    """At every place of every sample."""
    for at in range(len(sample.written) + 1):
        _expect(sample, _read(sample, [sample.written[:at], sample.written[at:]]))


@pytest.mark.parametrize("sample", _BY_NAME)
def test_single_letters_mean_what_the_whole_means(sample: Sample) -> None:
    """As models come whose tokens are letters."""
    _expect(sample, _read(sample, list(sample.written)))


_FRAGMENTS = sorted(
    {part for sample in SAMPLES for part in sample.written.replace("<", "\0<").replace("{", "\0{").split("\0")}
    | set('{}[]()"\\,:<|\n ')
)
_TEXTS = st.lists(st.sampled_from(_FRAGMENTS) | st.text(max_size=5), max_size=12).map("".join)


@settings(max_examples=examples(120), deadline=None)
@given(text=_TEXTS, cuts=st.lists(st.integers(0, 400), max_size=12), pair=st.sampled_from(_PAIRS), opened=st.booleans())
def test_any_text_means_the_same_however_it_is_cut(
    text: str, cuts: list[int], pair: tuple[str, str], *, opened: bool
) -> None:
    """Markers in any order, half of them, and what is between."""
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(places)]
    whole, parted = (
        _joined(make_parser(*pair, tools=TOOLS, opened=opened), given_pieces) for given_pieces in ([text], pieces)
    )
    assert (parted.content, parted.thought, parted.calls) == (whole.content, whole.thought, whole.calls)


_DROPPED = re.compile(
    r"<\|(?:im_end|eom_id|eot_id|tool_response|end|return|call|eom|eot)\|?>|</s>|<turn\|>|<\uff5c(?:tool▁calls▁(?:begin|end)|end▁of▁sentence)\uff5c>"
)
_WHOLE = ("none", "qwen3coder", "minicpm5", "lfm2", "gemma4")


def _letters(text: str) -> str:
    return "".join(text.split())


@settings(max_examples=examples(120), deadline=None)
@given(text=_TEXTS, pair=st.sampled_from(_PAIRS))
def test_a_text_without_calls_and_thoughts_is_content_to_the_last_letter(text: str, pair: tuple[str, str]) -> None:
    """But for marks that mean nothing, and blanks."""
    found = _joined(make_parser(*pair, tools=TOOLS), [text])
    if not found.calls and not found.thought and "<|message|>" not in text and "</think>" not in text:
        assert _letters(_DROPPED.sub("", found.content)) == _letters(_DROPPED.sub("", text))


@settings(max_examples=examples(120), deadline=None)
@given(
    parts=st.lists(st.sampled_from(_FRAGMENTS) | st.integers(100, 999).map("w{}".format), max_size=14),
    tools=st.sampled_from(_WHOLE),
)
def test_no_word_is_lost_of_calls_that_are_half_right(parts: list[str], tools: str) -> None:
    """It is in the content, or in a call."""
    found = _joined(make_parser(tools, "none", tools=TOOLS), [" ".join(parts)])
    told = " ".join([found.content, *(" ".join(call) for call in found.calls)])
    words = [part for part in parts if part[:1] == "w" and part[1:].isdecimal()]
    assert not [word for word in words if told.count(word) < words.count(word)]


def test_text_streams_up_to_what_may_begin_a_call() -> None:
    """What is certain is not held back."""
    parser = make_parser("hermes3", "none")
    assert [delta.text for delta in parser.feed("a < b, see <tool_c")] == ["a < b, see"]
    assert [delta.text for delta in parser.feed("orn>")] == [" <tool_corn>"]


def test_arguments_stream_as_they_come() -> None:
    """From the name on, in JSON and in tags."""
    parser = make_parser("hermes3", "none")
    assert parser.feed('<tool_call>{"name": "write"') == []
    (begun,) = parser.feed(', "arguments": {"text": "once')
    assert (begun.calls[0].name, begun.calls[0].arguments) == ("write", '{"text": "once')
    assert [delta.calls[0].arguments for delta in parser.feed(" upon")] == [" upon"]
    tagged = make_parser("qwen3coder", "none", tools=TOOLS)
    tagged.feed("<tool_call><function=write><parameter=text>once")
    assert [delta.calls[0].arguments for delta in tagged.feed(' "upon"')] == [' \\"upon\\"']


def test_reasoning_streams() -> None:
    """Up to what may be its end."""
    parser = make_parser("none", "qwen3")
    assert parser.feed("<think>\n") == []
    assert [delta.reasoning for delta in parser.feed("one two </th")] == ["one two"]
    assert [delta.reasoning for delta in parser.feed("ree")] == [" </three"]


@pytest.mark.parametrize("tools", [name for name in TOOL_PARSERS if name != "auto"])
def test_a_long_text_of_beginnings_of_calls_is_content(tools: str) -> None:
    """What is read twice is bounded."""
    for unit in (
        '<tool_call>{"a',
        "functools[",
        "[TOOL_CALLS]x",
        '{"tool_calls":[',
        "<|tool_call_start|>[f(a='\"",
        "\n",
    ):
        text = unit * (200_000 // len(unit))
        found = _joined(make_parser(tools, "none"), [text[at : at + 500] for at in range(0, len(text), 500)])
        assert _letters(found.content) == _letters(text)


def test_deeply_nested_arguments_are_content_where_they_must_be_read_whole() -> None:
    """And no error."""
    text = f"<|tool_call_start|>[f(a={'[' * 5000}{']' * 5000})]<|tool_call_end|>"
    assert _joined(make_parser("lfm2", "none"), [text]).content == text


def test_an_unknown_parser_is_told_with_those_that_there_are() -> None:
    """And the one that was meant."""
    with pytest.raises(ConfigError, match=r"hermes3, llama3.*found \"hermes\"\); did you mean 'hermes3'"):
        make_parser("hermes", "none")
    with pytest.raises(ConfigError, match=r"reasoning_parser.*qwen3, deepseek"):
        make_parser("none", "mistral")


def test_a_format_of_messages_cannot_be_read_for_calls_alone() -> None:
    """Naming one of the two is naming both."""
    with pytest.raises(ConfigError, match="'gptoss' for both, found 'qwen3'"):
        make_parser("gptoss", "qwen3")
    assert chosen_parsers("gptoss", "none") == ("gptoss", "gptoss")
    assert chosen_parsers("auto", "onyx") == ("onyx", "onyx")


@pytest.mark.parametrize("name", TOOL_PARSERS)
@pytest.mark.parametrize("reasoning", ["none", "auto"])
def test_every_name_makes_a_parser(name: str, reasoning: str) -> None:
    """Plain text passes all of them."""
    assert _joined(make_parser(name, reasoning), ["plain ", "text"]).content == "plain text"


def test_every_reasoning_parser_is_one() -> None:
    """Plain text passes all of them."""
    for name in REASONING_PARSERS:
        assert _joined(make_parser("auto", name), ["plain ", "text"]).content == "plain text"


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
    ],
)
def test_parsers_are_found_by_the_template(template: str, expected: tuple[str, str]) -> None:
    """By the marks that it writes."""
    assert chosen_parsers("auto", "auto", template) == expected


def test_formats_of_special_tokens_ask_for_them() -> None:
    """Others are decoded without."""
    asking = {name for name in TOOL_PARSERS if make_parser(name, "auto").keeps_special_tokens}
    assert asking == {"llama3", "mistral", "devstral", "gptoss", "lfm2", "gemma4", "onyx", "deepseek"}
    assert make_parser("none", "lfm2").keeps_special_tokens


def test_a_prompt_that_ends_with_the_marker_begins_within_reasoning() -> None:
    """One that ends behind reasoning does not."""
    assert opens_reasoning("qwen3", "<|im_start|>assistant\n<think>\n")
    assert not opens_reasoning("qwen3", "<think>\n\n</think>\n\n")
    assert not opens_reasoning("none", "<think>")
