"""How `ovms stream` shows replies, without a server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from ovms_cli import console, stream_live
from ovms_cli.stream_show import show
from ovms_cli.stream_text import Seen
from ovms_cli.tables import Output
from ovmstrio.client.streaming import StreamOutput, StreamReply
from ovmstrio.core.errors import GraphFailure

if TYPE_CHECKING:
    from collections.abc import Generator

WORD, MORE, NUMBERS = (("word", "UINT8"), ("more", "UINT8"), ("numbers", "INT64"))


@pytest.fixture(autouse=True)
def _consoles_of_this_test() -> None:
    """The consoles belong to the streams that the test captures."""
    console.stdout.cache_clear()
    console.stderr.cache_clear()


def outputs(*given: tuple[tuple[str, str], bytes]) -> Generator[StreamReply]:
    """Give a reply for each output, with timestamps from 1."""
    for stamp, ((name, datatype), data) in enumerate(given, start=1):
        yield StreamReply(
            (StreamOutput(name, datatype, (len(data) // (8 if datatype == "INT64" else 1),), data),), stamp
        )


def test_outputs_that_take_turns_begin_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """One text goes on; another has its name before it; numbers have a line; what is empty is nothing."""
    number = (5).to_bytes(8, "little")
    replies = outputs((WORD, b"a "), (WORD, b"b"), (MORE, b""), (MORE, b"c\n"), (NUMBERS, number), (WORD, b"d"))
    show(replies, Seen(), Output.TABLE, verbose=False, live=True)
    assert capsys.readouterr().out == "a b\nmore: c\nnumbers: INT64 [1] 5\nword: d\n"


def test_verbose_lines_have_timestamps(capsys: pytest.CaptureFixture[str]) -> None:
    """A text stays on its line, and no terminal obeys it; the figures are told apart from the answer."""
    seen = Seen()
    show(outputs((WORD, b"a\nb"), (WORD, b"\x1b[2J")), seen, Output.TABLE, verbose=True, live=True)
    told = capsys.readouterr()
    assert told.out == "1  word  a\\nb\n2  word  \\x1b[2J\n"
    assert told.err.startswith("first output after")
    assert "2 outputs" in seen.summary()


def test_problems_are_told_and_kept_apart_from_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """In JSON they are a reply like others; they count as no output."""
    seen = Seen()
    replies = (reply for reply in [StreamReply(error="bad [timestamp]"), *outputs((WORD, b"a"))])
    show(replies, seen, Output.JSON, verbose=False, live=True)
    told = capsys.readouterr()
    assert [json.loads(line) for line in told.out.splitlines()] == [
        {"error": "bad [timestamp]"},
        {"timestamp": 1, "outputs": {"word": "a"}},
    ]
    assert told.err == "error: bad [timestamp]\n"
    assert (seen.outputs, seen.problem) == (1, "bad [timestamp]")


def test_a_stream_that_fails_is_closed_and_ends_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The text that came stands."""
    closed = []

    def failing() -> Generator[StreamReply]:
        try:
            yield from outputs((WORD, b"so far"))
            raise GraphFailure("why")
        finally:
            closed.append(True)

    with pytest.raises(GraphFailure, match="why"):
        show(failing(), Seen(), Output.TABLE, verbose=False, live=True)
    assert (capsys.readouterr().out, closed) == ("so far\n", [True])


def growing(monkeypatch: pytest.MonkeyPatch, width: int, height: int) -> stream_live._Growing:
    """Make texts that grow on a terminal of a size."""
    screen = Console(width=width, height=height, force_terminal=True)
    monkeypatch.setattr(stream_live, "stdout", lambda: screen)
    return stream_live._Growing(Seen())  # noqa: SLF001 - drawing is observed without a terminal


def test_the_end_of_a_long_text_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more than the terminal has room for, with the figures on one line below."""
    texts = growing(monkeypatch, 20, 6)
    for number in range(5000):
        texts.add("word", f"word{number} ")
        if number % 500 == 0:
            assert texts.draw().plain.count("\n") < 6
    lines = texts.draw().plain.splitlines()
    assert lines[-2].split()[-1] == "word4999"
    assert lines[-1] == "no output"
    assert all(len(line) <= 20 for line in lines)


def test_several_texts_share_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long one does not push a short one out, and each has its name; empty ones have none."""
    texts = growing(monkeypatch, 20, 8)
    texts.add("word", "word " * 500)
    texts.add("more", "short")
    texts.add("end", "")
    lines = texts.draw().plain.splitlines()
    assert lines[-2] == "more: short"
    assert lines[0].startswith("word word")
    assert texts.texts()[1:] == ["more: short"]
