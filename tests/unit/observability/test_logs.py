"""Log lines: formats, bounds, escaping and the writing thread."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import pytest
import structlog
import trio

from ovmstrio.api.doors import KSERVE_GRPC
from ovmstrio.core.errors import InvalidRequest, ModelFailure
from ovmstrio.core.events import OK, CallEvent, WireRequest
from ovmstrio.core.texts import CONTROLS, MOST_CHARACTERS
from ovmstrio.observability.access_log import AccessLog, AccessLogForm
from ovmstrio.observability.log_sinks import StandardSink
from ovmstrio.observability.log_writer import LogOutlet, LogWriter
from ovmstrio.observability.logs import configure_logs
from ovmstrio.observability.request_log import RequestLog
from tests.support.peers import LOCAL
from tests.support.waits import WAIT_SECONDS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a log file."""
    return tmp_path / "server.log"


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_logs_are_one_object_per_line_for_all_loggers(path: Path) -> None:
    configure_logs(fmt="json", path=path)
    structlog.get_logger("ours").info("model available", model="m")
    logging.getLogger("theirs").warning("%s happened", "something")
    ours, theirs = _lines(path)
    assert (ours["event"], ours["model"], ours["level"], ours["logger"]) == ("model available", "m", "info", "ours")
    assert (theirs["event"], theirs["level"], theirs["logger"]) == ("something happened", "warning", "theirs")


def test_records_below_the_level_are_not_written(path: Path) -> None:
    configure_logs(level="ERROR", fmt="json", path=path)
    structlog.get_logger("ours").warning("quiet")
    logging.getLogger("theirs").warning("quiet")
    assert _lines(path) == []


def test_only_failures_of_the_server_are_logged_with_their_traceback(path: Path) -> None:
    configure_logs(fmt="json", path=path)
    log = RequestLog()

    def ended(code: str, error: Exception | None) -> None:
        event = CallEvent("m", "1", "model", KSERVE_GRPC, "ModelInfer", "42", code=code, error=error)
        log.call_finished(event)

    ended(OK, None)
    ended("InvalidRequest", InvalidRequest("shape"))
    with pytest.raises(ModelFailure) as raised:
        _raise(ModelFailure("the device is gone"))
    ended("ModelFailure", raised.value)
    (line,) = _lines(path)
    assert line["level"] == "error"
    assert (line["model"], line["request_id"], line["code"]) == ("m", "42", "ModelFailure")
    assert "the device is gone" in json.dumps(line["exception"])
    assert __file__ in json.dumps(line["exception"])


def test_a_log_file_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file or directory"):
        configure_logs(path=tmp_path / "nowhere" / "server.log")


# Control characters


HOSTILE = [
    "\x1b[31mred",
    "\x1b]0;title\x07",
    "\x9b2J",
    "\x7f",
    "a\u202eb",
    "a\u2066b",
    "a\u2028b",
    "a\u2029b",
    "\r2026-01-01 forged",
    "a\n2026-01-01T00:00:00Z [error    ] forged",
    "tab\there",
    "\ud800",
]


class _Shown:
    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text

    __str__ = __repr__


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("place", ["event", "value", "object", "nested", "key", "logger", "standard", "argument"])
def test_a_field_of_a_console_line_has_no_raw_control_characters(text: str, place: str, path: Path) -> None:
    configure_logs(path=path)
    ours = structlog.get_logger("ours")
    match place:
        case "event":
            ours.error(text)
        case "value":
            ours.error("model loaded", model=text)
        case "object":
            ours.error("model loaded", model=_Shown(text))
        case "nested":
            ours.error("model loaded", models=[{"name": _Shown(text)}])
        case "key":
            ours.error("model loaded", **{text: 1})
        case "logger":
            logging.getLogger(f"x{text}").error("loaded")
        case "standard":
            logging.getLogger("theirs").error(text)
        case _:
            logging.getLogger("theirs").error("loaded %s", text)
    written = path.read_bytes().decode("utf-8", "surrogatepass")
    assert written.endswith("\n")
    assert CONTROLS.sub("", written[:-1]) == written[:-1]


@pytest.mark.parametrize("fmt", ["pretty", "json"])
@pytest.mark.parametrize("text", HOSTILE)
def test_a_traceback_has_no_raw_control_characters_but_its_line_breaks(
    text: str, fmt: Literal["pretty", "json"], path: Path
) -> None:
    configure_logs(fmt=fmt, path=path)
    try:
        _raise(ValueError(text))
    except ValueError:
        structlog.get_logger("ours").exception("call failed", name=text)
        logging.getLogger("theirs").exception("failed")
    written = path.read_bytes().decode("utf-8", "surrogatepass")
    assert set(CONTROLS.findall(written)) == {"\n"}
    assert written.count("Traceback (most recent call last)" if fmt == "pretty" else '"exc_type": "ValueError"') == 2


def test_colours_of_the_console_stay_and_those_of_a_value_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    configure_logs()
    structlog.get_logger("ours").error("\x1b[5mloaded", model="\x1b[5mname", path="\x1b]0;a title\x07")
    written = terminal.getvalue()
    assert "\x1b[" in written
    assert "\x1b[5m" not in written
    assert "\x1b]" not in written
    assert "\\x1b[5mloaded" in written
    assert "\\x1b[5mname" in written
    assert "'\\x1b]0;a title\\x07'" in written


@pytest.mark.parametrize("form", ["combined", "json"])
@pytest.mark.parametrize("text", HOSTILE)
def test_an_access_log_line_has_no_raw_control_characters(
    text: str, form: AccessLogForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    request = WireRequest("HTTP", text, f"/v2/{text}", [("user-agent", text), ("referer", text)], LOCAL)
    request.status = 200
    AccessLog(form, LogOutlet(StandardSink("stdout"))).request_ended(request)
    written = out.getvalue()
    assert CONTROLS.sub("", written) == written.removesuffix("\n")
    if form == "json":
        assert json.loads(written)["user_agent"] == text


# Writing thread and bounds


LONG = "x" * 20_000_000


class _SlowSink:
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


def _logger_to(outlet: logging.Handler) -> logging.Logger:
    """Make a logger of its own."""
    made = logging.Logger("test", logging.DEBUG)  # noqa: LOG001 - one that nobody else has
    made.addHandler(outlet)
    return made


def test_without_a_server_the_logging_thread_writes() -> None:
    sink = _SlowSink()
    sink.is_open.set()
    _logger_to(LogOutlet(sink, LogWriter())).info("read %d", 7)
    assert sink.lines == ["read 7"]
    assert sink.threads == {threading.get_ident()}


async def test_a_thread_writes_all_lines_in_order_before_it_ends() -> None:
    sink, writer = _SlowSink(), LogWriter()
    log = _logger_to(LogOutlet(sink, writer))
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


async def test_lines_beyond_the_buffer_are_dropped_and_counted() -> None:
    sink, writer = _SlowSink(), LogWriter(most_characters=1000)
    outlet = LogOutlet(sink, writer)
    log = _logger_to(outlet)
    async with writer.in_thread():
        for _ in range(300):
            log.info("ten chars!")
        assert writer.dropped == 200
        sink.is_open.set()
    assert sink.lines.count("ten chars!") == 100
    assert sink.lines.count("200 lines dropped") == 1
    assert writer.dropped == 200


async def test_a_blocked_sink_is_abandoned_at_shutdown() -> None:
    sink, other, writer = _SlowSink(), _SlowSink(), LogWriter(flush_seconds=0.1)
    other.is_open.set()
    log, reported = _logger_to(LogOutlet(sink, writer)), _logger_to(LogOutlet(other, writer))
    with trio.fail_after(WAIT_SECONDS):
        async with writer.in_thread():
            log.info("_stderr_pipe")
            reported.info("read")
    assert sink.lines == ["given up", "_stderr_pipe"]
    assert other.lines == ["read"]


async def test_a_sink_is_closed_after_its_last_line() -> None:
    sink, writer = _SlowSink(), LogWriter()
    outlet = LogOutlet(sink, writer)
    async with writer.in_thread():
        _logger_to(outlet).info("last")
        outlet.close()
        assert not sink.is_closed
        sink.is_open.set()
    assert (sink.lines, sink.is_closed) == (["last"], True)


@contextmanager
def _stderr_pipe() -> Iterator[int]:
    """Make standard error a pipe; gives the end that nobody reads."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with open(writing, "w", encoding="utf-8") as stream, pytest.MonkeyPatch.context() as patched:  # noqa: PTH123 - a descriptor
        patched.setattr(sys, "stderr", stream)
        patched.setattr(sys, "__stderr__", stream)
        yield reading
        os.close(reading)


async def test_an_unread_pipe_blocks_neither_the_loop_nor_shutdown() -> None:
    writer = LogWriter(flush_seconds=0.1)
    log = _logger_to(LogOutlet(StandardSink("stderr"), writer))
    with _stderr_pipe() as pipe, trio.fail_after(WAIT_SECONDS):
        async with writer.in_thread():
            for _ in range(1000):
                log.info("y" * 1000)
        log.info("afterwards")
        assert len(os.read(pipe, 2**20)) >= 32 * 1024


async def test_a_pipe_that_is_read_late_receives_every_line() -> None:
    writer = LogWriter()
    log = _logger_to(LogOutlet(StandardSink("stderr"), writer))
    read = bytearray()
    expected = [f"{number} {'y' * 1000}" for number in range(300)]
    with _stderr_pipe() as pipe, trio.fail_after(WAIT_SECONDS):
        async with writer.in_thread():
            for line in expected:
                log.info(line)
            while len(read) < sum(map(len, expected)) + len(expected):
                await trio.lowlevel.wait_readable(pipe)
                read.extend(os.read(pipe, 65536))
    assert read.decode().splitlines() == expected


@pytest.mark.parametrize("fmt", ["pretty", "json"])
def test_lines_have_a_bounded_length(fmt: str, path: Path) -> None:
    configure_logs(fmt="json" if fmt == "json" else "pretty", path=path, level="DEBUG")
    ours, theirs = structlog.get_logger("ours"), logging.getLogger("theirs")
    ours.info("first")
    error = ValueError(LONG)
    error.__cause__ = KeyError([LONG])
    size = path.stat().st_size
    for log in (
        lambda: ours.info("event", text=LONG, parts=[LONG] * 100, error=error),
        lambda: ours.error("failed", exc_info=error),
        lambda: theirs.info(LONG),
        lambda: theirs.info("%s and %s", LONG, {"text": LONG}),
        lambda: theirs.error("failed", exc_info=error),
        lambda: theirs.info("extra", extra={"payload": [list(range(1000))] * 1000}),
    ):
        log()
        assert path.stat().st_size - size < 50_000
        size = path.stat().st_size


def test_the_exception_of_a_line_is_the_handled_one(path: Path) -> None:
    configure_logs(fmt="json", path=path)
    try:
        _raise(ValueError(LONG))
    except ValueError:
        structlog.get_logger("ours").exception("failed")
        logging.getLogger("theirs").exception("failed")
    for line in _lines(path):
        (reported,) = line["exception"]
        assert reported["exc_type"] == "ValueError"
        assert reported["exc_value"] == f"{LONG[:MOST_CHARACTERS]}... (20000000 characters)"


def test_a_line_that_cannot_be_formatted_reports_its_place(path: Path) -> None:
    configure_logs(fmt="json", path=path)
    logging.getLogger("theirs").info("%d", "seven")
    (line,) = _lines(path)
    assert line["event"].startswith(f"a line cannot be formatted: {__file__}: TypeError")
