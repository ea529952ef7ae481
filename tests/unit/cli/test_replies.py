from __future__ import annotations

import json
import struct
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from ovmstrio.cli import console, stream_live
from ovmstrio.cli.handler_call import post_file
from ovmstrio.cli.sequence_run import StepAnswer
from ovmstrio.cli.sequence_show import OutputRecorder, show
from ovmstrio.cli.stream_show import show as show_stream
from ovmstrio.cli.stream_text import Seen, TextReader, line_of, safe_for_terminals, text_of, values_of
from ovmstrio.cli.tables import Output
from ovmstrio.client.api import Posted, StreamOutput, StreamReply
from ovmstrio.core.errors import GraphFailure, InvalidRequest

WORD, MORE, NUMBERS = (("word", "UINT8"), ("more", "UINT8"), ("numbers", "INT64"))


@pytest.fixture(autouse=True)
def _consoles_of_this_test() -> None:
    console.stdout.cache_clear()
    console.stderr.cache_clear()


def _replies(*given: tuple[tuple[str, str], bytes]) -> Generator[StreamReply]:
    for stamp, ((name, datatype), data) in enumerate(given, start=1):
        size = len(data) // (8 if datatype == "INT64" else 1)
        yield StreamReply((StreamOutput(name, datatype, (size,), data),), stamp)


def test_texts_are_joined_and_verbose_lines_have_timestamps(capsys: pytest.CaptureFixture[str]) -> None:
    number = (5).to_bytes(8, "little")
    replies = _replies((WORD, b"a "), (WORD, b"b"), (MORE, b""), (MORE, b"c\n"), (NUMBERS, number), (WORD, b"d"))
    show_stream(replies, Seen(), Output.TABLE, verbose=False, live=True)
    assert capsys.readouterr().out == "a b\nmore: c\nnumbers: INT64 [1] 5\nword: d\n"
    seen = Seen()
    show_stream(_replies((WORD, b"a\nb"), (WORD, b"\x1b[2J")), seen, Output.TABLE, verbose=True, live=True)
    captured = capsys.readouterr()
    assert captured.out == "1  word  a\\nb\n2  word  \\x1b[2J\n"
    assert captured.err.startswith("first output after")
    assert "2 outputs" in seen.summary()


def test_error_replies_go_to_standard_error_and_into_json(capsys: pytest.CaptureFixture[str]) -> None:
    seen = Seen()
    replies = (reply for reply in [StreamReply(error="bad [timestamp]"), *_replies((WORD, b"a"))])
    show_stream(replies, seen, Output.JSON, verbose=False, live=True)
    captured = capsys.readouterr()
    assert [json.loads(line) for line in captured.out.splitlines()] == [
        {"error": "bad [timestamp]"},
        {"timestamp": 1, "outputs": {"word": "a"}},
    ]
    assert captured.err == "error: bad [timestamp]\n"
    assert (seen.outputs, seen.problem) == (1, "bad [timestamp]")


def test_a_failed_stream_is_closed_and_its_line_ended(capsys: pytest.CaptureFixture[str]) -> None:
    closed = []

    def failing() -> Generator[StreamReply]:
        try:
            yield from _replies((WORD, b"so far"))
            raise GraphFailure("why")
        finally:
            closed.append(True)

    with pytest.raises(GraphFailure, match="why"):
        show_stream(failing(), Seen(), Output.TABLE, verbose=False, live=True)
    assert (capsys.readouterr().out, closed) == ("so far\n", [True])


def _growing(monkeypatch: pytest.MonkeyPatch, width: int, height: int) -> stream_live._Growing:
    screen = Console(width=width, height=height, force_terminal=True)
    monkeypatch.setattr(stream_live, "stdout", lambda: screen)
    return stream_live._Growing(Seen())  # noqa: SLF001 - drawing is observed without a terminal


def test_texts_that_grow_share_the_height_and_show_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = _growing(monkeypatch, 20, 6)
    for number in range(5000):
        texts.add("word", f"word{number} ")
        if number % 500 == 0:
            assert texts.draw().plain.count("\n") < 6
    lines = texts.draw().plain.splitlines()
    assert lines[-2].split()[-1] == "word4999"
    assert lines[-1] == "no output"
    assert all(len(line) <= 20 for line in lines)
    texts = _growing(monkeypatch, 20, 8)
    texts.add("word", "word " * 500)
    texts.add("more", "short")
    texts.add("end", "")
    lines = texts.draw().plain.splitlines()
    assert lines[-2] == "more: short"
    assert lines[0].startswith("word word")
    assert texts.texts()[1:] == ["more: short"]


def _output(data: object, datatype: str = "UINT8", shape: tuple[int, ...] | None = None) -> StreamOutput:
    return StreamOutput("out", datatype, (len(data),) if shape is None else shape, data)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (_output("héllo\n".encode()), "héllo\n"),
        (_output(b"", "BYTES"), ""),
        (_output(b"ok", "my_type"), "ok"),
        (_output("x", "JSON", ()), "x"),
        (_output("\U0001f468\u200d\U0001f469\ufeff".encode()), "\U0001f468\u200d\U0001f469\ufeff"),
        (_output(b"\xff\xd8"), None),
        (_output(b"\x00\x01"), None),
        (_output(b"abcd", "FP32", (1,)), None),
        (_output(struct.pack("<I", 2) + b"ab", "BYTES", (1,)), None),
        (_output([1, 2], "JSON"), None),
    ],
)
def test_texts_are_distinguished_from_numbers(given: StreamOutput, text: str | None) -> None:
    assert text_of(given) == text
    assert TextReader().read(given) == text


def test_a_split_character_is_joined_only_after_text() -> None:
    reader = TextReader()
    assert reader.read(_output(b"\xc3")) is None
    assert [reader.read(_output(part)) for part in (b"h\xc3", b"\xa9", b"")] == ["h", "é", ""]
    assert reader.read(_output(b"\xff\xff")) is None
    assert reader.read(_output(b"\xc3")) is None


@pytest.mark.parametrize(
    ("given", "values"),
    [
        (_output(np.array([[1.5, np.nan]], np.float32).tobytes(), "FP32", (1, 2)), [[1.5, "NaN"]]),
        (_output(struct.pack("<I", 2) + b"ab", "BYTES", (1,)), ["ab"]),
        (_output(b"\xff\x00", "BYTES", (1,)), [255, 0]),
        (_output(b"abc", "FP32", (1,)), [97, 98, 99]),
        (_output(b"\x00\x01", "my_type"), [0, 1]),
        (_output([True], "JSON"), [True]),
    ],
)
def test_values_are_json_serializable(given: StreamOutput, values: object) -> None:
    assert values_of(given) == values


def test_arrays_are_summarized_and_control_characters_escaped() -> None:
    array = np.arange(10, dtype=np.float32).reshape(2, 5) / 2
    assert line_of(_output(array.tobytes(), "FP32", (2, 5))) == "FP32 [2, 5] 0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, ..."
    assert line_of(_output(7, "JSON", ())) == "JSON [] 7"
    assert line_of(_output(b"", "FP32", (0,))) == "FP32 [0]"
    assert safe_for_terminals("a\x1b[2Jb\r\nc\td\x9be") == "a\\x1b[2Jb\nc\td\\x9be"


def _answers(*values: float) -> Generator[StepAnswer]:
    for step, value in enumerate(values):
        outputs = {"y": np.full((1, 2), value, np.float32), "word": np.array([f"{value:g}".encode()], object)}
        yield StepAnswer(step, 0.002, outputs)


def test_the_summary_has_minimum_mean_maximum_and_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    show(_answers(1, 6, 2), 17, 3, OutputRecorder(), Output.TABLE)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["y", "float32", "[1,", "2]", "1", "3", "6", "2,", "2"] in lines
    assert ["word", "bytes", "[1]", "-", "-", "-", "b'2'"] in lines
    summary = " ".join(lines[-1])
    assert summary.startswith("3 steps in ")
    assert "median 2.00, p99 2.00, max 2.00; sequence 17 has ended" in summary


@pytest.mark.parametrize(("axis", "shape"), [(None, (3, 1, 2)), (0, (3, 2)), (1, (1, 6)), (-1, (1, 6))])
def test_outputs_are_stacked_or_joined(tmp_path: Path, axis: int | None, shape: tuple[int, ...]) -> None:
    answers = (StepAnswer(step, 0.0, {"y": np.full((1, 2), step, np.float32)}) for step in range(3))
    show(answers, 1, 3, OutputRecorder.from_options(str(tmp_path / "y.npy"), axis), Output.JSON)
    saved = np.load(tmp_path / "y.npy")
    assert saved.shape == shape
    assert saved.reshape(-1).tolist() == [0, 0, 1, 1, 2, 2]


def test_outputs_that_cannot_be_saved_end_the_sequence(tmp_path: Path) -> None:
    closed = []

    def answers() -> Generator[StepAnswer]:
        try:
            for size in (1, 1, 2, 1):
                yield StepAnswer(0, 0.0, {"y": np.zeros((size, 2))})
        finally:
            closed.append(size)

    with pytest.raises(InvalidRequest, match=r'"y": \[1, 2\] and \[2, 2\] cannot be stacked; see --join'):
        show(answers(), 1, 4, OutputRecorder.from_options(str(tmp_path / "y.npz"), None), Output.JSON)
    assert closed == [2]
    with pytest.raises(InvalidRequest, match="cannot be joined along axis 5"):
        show(answers(), 1, 4, OutputRecorder.from_options(str(tmp_path / "y.npz"), 5), Output.JSON)
    assert closed == [2, 1]
    with pytest.raises(InvalidRequest, match=r"the model returns y, word; save several outputs as \.npz"):
        show(_answers(1, 2), 1, 2, OutputRecorder.from_options(str(tmp_path / "y.npy"), None), Output.JSON)


@pytest.mark.parametrize(
    ("file", "text"), [("table", "a file ending in"), ("/nowhere/y.npy", "there is no folder /nowhere")]
)
def test_an_unusable_output_file_is_refused(file: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        OutputRecorder.from_options(file, 0)


@pytest.mark.parametrize(("body", "shown"), [(b'{"a":1}', '{\n  "a": 1\n}\n'), (b"", ""), (b"not JSON", "not JSON")])
def test_a_response_that_is_not_the_json_of_its_content_type_is_shown_as_it_is(
    body: bytes, shown: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    class Handler:
        def post(self, *_: object) -> Posted:
            return Posted(body, "application/json")

    client: Any = Handler()
    post_file(client, "handler", ["{}"], "table")
    sys.stdout.flush()
    assert capfdbinary.readouterr().out == shown.encode()
