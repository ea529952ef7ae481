from __future__ import annotations

import io
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import trio

from ovmstrio.util.stdio import LineStream, finish_lines


def _stream(*, has_consumer: bool = True) -> tuple[LineStream, list[str], io.StringIO]:
    lines: list[str] = []
    original = io.StringIO()
    return LineStream(original, lines.append, lambda: has_consumer), lines, original


def test_pieces_become_a_line_at_its_line_break() -> None:
    stream, lines, original = _stream()
    print("a", "b", sep="-", end="", file=stream, flush=True)
    print(" c", file=stream)
    stream.writelines(["d", "e\nf\n"])
    assert lines == ["a-b c", "de", "f"]
    assert not original.getvalue()


def test_an_open_line_ends_with_the_code_that_wrote_it() -> None:
    stream, lines, _ = _stream()
    print("open", end="", file=stream)
    assert lines == []
    finish_lines()
    print("next", file=stream)
    finish_lines()
    assert lines == ["open", "next"]


def test_threads_do_not_write_into_each_others_lines() -> None:
    stream, lines, _ = _stream()
    barrier = threading.Barrier(4)

    def write(name: str) -> None:
        for _ in range(20):
            for piece in (name, name, name, "\n"):
                barrier.wait()
                stream.write(piece)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, "abcd"))
    assert sorted(lines) == ["aaa"] * 20 + ["bbb"] * 20 + ["ccc"] * 20 + ["ddd"] * 20


async def test_tasks_do_not_write_into_each_others_lines() -> None:
    stream, lines, _ = _stream()

    async def write(name: str) -> None:
        for piece in (name, name, "\n"):
            stream.write(piece)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        for name in "abc":
            nursery.start_soon(write, name)
    assert sorted(lines) == ["aa", "bb", "cc"]


@pytest.mark.parametrize("pieces", [["x" * 10_000], ["x"] * 10_000], ids=["at once", "one by one"])
def test_long_lines_long_texts_and_states_of_a_progress_bar_are_cut(pieces: list[str]) -> None:
    stream, lines, _ = _stream()
    stream.writelines([*pieces, "\nshort\n", "line\n" * 5000])
    assert [line[:4097].count("x") for line in lines[:2]] == [4096, 0]
    assert len(lines[0]) < 4200
    assert lines[1] == "short"
    assert lines[2:] == ["line"] * 1000 + ["... (5000 lines)"]
    del lines[:]
    for percent in range(0, 101, 10):
        stream.write(f"\r{percent}%")
        stream.flush()
    print("\n\r\n", file=stream)
    assert lines == ["100%"]
    with pytest.raises(TypeError, match="must be str, not bytes"):
        stream.write(b"bytes")  # type: ignore[arg-type]


def test_lines_without_a_consumer_go_to_the_original_stream() -> None:
    stream, lines, original = _stream(has_consumer=False)
    print("a", end="", file=stream, flush=True)
    assert original.getvalue() == "a"
    assert lines == []
    assert stream.getvalue() == "a"
    assert not stream.isatty()
