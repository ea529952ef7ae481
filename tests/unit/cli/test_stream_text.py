"""Outputs of a stream as `ovms stream` reads them: what is a text, and what is shown of the rest."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from ovms_cli.stream_text import TextReader, line_of, safe_for_terminals, text_of, values_of
from ovmstrio.client.streaming import StreamOutput


def output(data: object, datatype: str = "UINT8", shape: tuple[int, ...] | None = None) -> StreamOutput:
    """Make an output."""
    return StreamOutput("out", datatype, (len(data),) if shape is None else shape, data)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (output("héllo\n".encode()), "héllo\n"),
        (output(b"", "BYTES"), ""),
        (output(b"ok", "my_type"), "ok"),
        (output("x", "JSON", ()), "x"),
        (output("\U0001f468\u200d\U0001f469\ufeff".encode()), "\U0001f468\u200d\U0001f469\ufeff"),
        (output(b"\xff\xd8"), None),
        (output(b"\x00\x01"), None),
        (output(b"abcd", "FP32", (1,)), None),
        (output(struct.pack("<I", 2) + b"ab", "BYTES", (1,)), None),
        (output([1, 2], "JSON"), None),
    ],
)
def test_texts_are_told_from_numbers(given: StreamOutput, text: str | None) -> None:
    """UTF-8 without control characters, of the types that Python nodes give to texts."""
    assert text_of(given) == text
    assert TextReader().read(given) == text


def test_a_letter_is_put_together_only_where_text_came_before() -> None:
    """A single byte that is no letter is a number; after text, it begins one."""
    reader = TextReader()
    assert reader.read(output(b"\xc3")) is None
    assert [reader.read(output(part)) for part in (b"h\xc3", b"\xa9", b"")] == ["h", "é", ""]
    assert reader.read(output(b"\xff\xff")) is None
    assert reader.read(output(b"\xc3")) is None


@pytest.mark.parametrize(
    ("given", "values"),
    [
        (output(np.array([[1.5, np.nan]], np.float32).tobytes(), "FP32", (1, 2)), [[1.5, "NaN"]]),
        (output(struct.pack("<I", 2) + b"ab", "BYTES", (1,)), ["ab"]),
        (output(b"\xff\x00", "BYTES", (1,)), [255, 0]),
        (output(b"abc", "FP32", (1,)), [97, 98, 99]),
        (output(b"\x00\x01", "my_type"), [0, 1]),
        (output([True], "JSON"), [True]),
    ],
)
def test_values_are_what_json_can_hold(given: StreamOutput, values: object) -> None:
    """Bytes that are not what their datatype says are numbers, and no failure."""
    assert values_of(given) == values


def test_other_outputs_are_summed_up() -> None:
    """Type, shape and the first values."""
    array = np.arange(10, dtype=np.float32).reshape(2, 5) / 2
    assert line_of(output(array.tobytes(), "FP32", (2, 5))) == "FP32 [2, 5] 0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, ..."
    assert line_of(output(7, "JSON", ())) == "JSON [] 7"
    assert line_of(output(b"", "FP32", (0,))) == "FP32 [0]"


def test_a_terminal_is_not_given_commands() -> None:
    """Colours, titles and moves of the cursor are shown as signs."""
    assert safe_for_terminals("a\x1b[2Jb\r\nc\td\x9be") == "a\\x1b[2Jb\nc\td\\x9be"
