"""Lines are written by a thread while a server runs, and an end that takes none holds nobody up."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import structlog
import trio

from ovmstrio.core.texts import MOST_CHARACTERS
from ovmstrio.observability.log_sinks import StandardSink
from ovmstrio.observability.log_writer import LogOutlet, LogWriter
from ovmstrio.observability.logs import configure_logs
from tests.support.waits import WAIT_SECONDS

LONG = "x" * 20_000_000


class Slow:
    """An end that takes lines when it is let."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.threads: set[int] = set()
        self.is_open = threading.Event()
        self.is_closed = False

    def write(self, text: str) -> None:
        """Take lines."""
        self.is_open.wait(60)
        self.threads.add(threading.get_ident())
        self.lines += text.split("\n")

    def give_up(self) -> None:
        """Wait for nothing more."""
        self.lines.append("given up")
        self.is_open.set()

    def close(self) -> None:
        """Note it."""
        self.is_closed = True


def logger_to(outlet: logging.Handler) -> logging.Logger:
    """Make a logger of its own."""
    made = logging.Logger("test", logging.DEBUG)  # noqa: LOG001 - one that nobody else has
    made.addHandler(outlet)
    return made


def test_without_a_server_lines_are_written_by_whoever_logs() -> None:
    """As commands do, which have no loop to keep free."""
    sink = Slow()
    sink.is_open.set()
    logger_to(LogOutlet(sink, LogWriter())).info("read %d", 7)
    assert sink.lines == ["read 7"]
    assert sink.threads == {threading.get_ident()}


async def test_a_thread_writes_and_nothing_is_lost_at_the_end() -> None:
    """Nor is the order, when the block ends with an error."""
    sink, writer = Slow(), LogWriter()
    log = logger_to(LogOutlet(sink, writer))
    with suppress(LookupError):
        async with writer.in_thread():
            for number in range(1000):
                log.info("%d", number)
            sink.is_open.set()
            raise LookupError
    assert sink.lines == [str(number) for number in range(1000)]
    assert threading.get_ident() not in sink.threads
    log.info("later")
    assert sink.lines[-1] == "later"


async def test_lines_without_room_are_dropped_and_counted() -> None:
    """What is logged costs neither time nor memory while nobody reads."""
    sink, writer = Slow(), LogWriter(most_characters=1000)
    outlet = LogOutlet(sink, writer)
    log = logger_to(outlet)
    async with writer.in_thread():
        for _ in range(300):
            log.info("ten chars!")
        assert writer.dropped == 200
        sink.is_open.set()
    assert sink.lines.count("ten chars!") == 100
    assert sink.lines.count("200 lines dropped") == 1
    assert writer.dropped == 200


async def test_an_end_that_takes_nothing_is_given_up_at_the_end() -> None:
    """The process can end, and what is logged afterwards waits for nobody."""
    sink, other, writer = Slow(), Slow(), LogWriter(flush_seconds=0.1)
    other.is_open.set()
    log, told = logger_to(LogOutlet(sink, writer)), logger_to(LogOutlet(other, writer))
    with trio.fail_after(WAIT_SECONDS):
        async with writer.in_thread():
            log.info("unread")
            told.info("read")
    assert sink.lines == ["given up", "unread"]
    assert other.lines == ["read"]


async def test_an_end_is_closed_behind_its_last_line() -> None:
    """Files of what is unloaded while the server goes on."""
    sink, writer = Slow(), LogWriter()
    outlet = LogOutlet(sink, writer)
    async with writer.in_thread():
        logger_to(outlet).info("last")
        outlet.close()
        assert not sink.is_closed
        sink.is_open.set()
    assert (sink.lines, sink.is_closed) == (["last"], True)


@contextmanager
def unread() -> Iterator[int]:
    """Make standard error a pipe; gives the end that nobody reads."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with open(writing, "w", encoding="utf-8") as stream, pytest.MonkeyPatch.context() as patched:  # noqa: PTH123 - a descriptor
        patched.setattr(sys, "stderr", stream)
        patched.setattr(sys, "__stderr__", stream)
        yield reading
        os.close(reading)


async def test_a_pipe_that_nobody_reads_holds_neither_the_loop_nor_the_end() -> None:
    """Whoever started the server has forgotten its output."""
    writer = LogWriter(flush_seconds=0.1)
    log = logger_to(LogOutlet(StandardSink("stderr"), writer))
    with unread() as pipe, trio.fail_after(WAIT_SECONDS):
        async with writer.in_thread():
            for _ in range(1000):
                log.info("y" * 1000)
        log.info("afterwards")
        assert len(os.read(pipe, 2**20)) >= 32 * 1024


async def test_a_pipe_that_is_read_late_gets_every_line() -> None:
    """A slow reader is no reason to drop lines while there is room."""
    writer = LogWriter()
    log = logger_to(LogOutlet(StandardSink("stderr"), writer))
    read = bytearray()
    expected = [f"{number} {'y' * 1000}" for number in range(300)]
    with unread() as pipe, trio.fail_after(WAIT_SECONDS):
        async with writer.in_thread():
            for line in expected:
                log.info(line)
            while len(read) < sum(map(len, expected)) + len(expected):
                await trio.lowlevel.wait_readable(pipe)
                read.extend(os.read(pipe, 65536))
    assert read.decode().splitlines() == expected


@pytest.mark.parametrize("fmt", ["pretty", "json"])
def test_whatever_is_logged_a_line_is_short(fmt: str, tmp_path: Path) -> None:
    """Messages, arguments, values, exceptions and what is extra, of the server and of others: 20 MB each."""
    path = tmp_path / "server.log"
    configure_logs(fmt="json" if fmt == "json" else "pretty", path=path, level="DEBUG")
    ours, theirs = structlog.get_logger("ours"), logging.getLogger("theirs")
    ours.info("first")
    error = ValueError(LONG)
    error.__cause__ = KeyError([LONG])
    size = path.stat().st_size
    for tell in (
        lambda: ours.info("event", text=LONG, parts=[LONG] * 100, error=error),
        lambda: ours.error("failed", exc_info=error),
        lambda: theirs.info(LONG),
        lambda: theirs.info("%s and %s", LONG, {"text": LONG}),
        lambda: theirs.error("failed", exc_info=error),
        lambda: theirs.info("extra", extra={"payload": [list(range(1000))] * 1000}),
    ):
        tell()
        assert path.stat().st_size - size < 50_000
        size = path.stat().st_size


def test_the_exception_of_a_line_is_the_one_that_is_handled(tmp_path: Path) -> None:
    """``log.exception`` takes it from where it is called."""
    path = tmp_path / "server.log"
    configure_logs(fmt="json", path=path)
    try:
        raise ValueError(LONG)  # noqa: TRY301
    except ValueError:
        structlog.get_logger("ours").exception("failed")
        logging.getLogger("theirs").exception("failed")
    for line in path.read_text().splitlines():
        (told,) = json.loads(line)["exception"]
        assert told["exc_type"] == "ValueError"
        assert told["exc_value"] == f"{LONG[:MOST_CHARACTERS]}... (20000000 characters)"


def test_a_line_that_cannot_be_formatted_says_so(tmp_path: Path) -> None:
    """With its place, and the server goes on."""
    path = tmp_path / "server.log"
    configure_logs(fmt="json", path=path)
    logging.getLogger("theirs").info("%d", "seven")
    (line,) = [json.loads(each) for each in path.read_text().splitlines()]
    assert line["event"].startswith(f"a line cannot be formatted: {__file__}: TypeError")
