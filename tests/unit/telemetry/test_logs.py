from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import pytest
import structlog
import trio
import trio.testing
from structlog.testing import capture_logs

from ovmstrio.core.errors import InvalidRequest, ModelFailure
from ovmstrio.core.events import OK, ApiInterface, CallEvent, WireProtocol, WireRequest
from ovmstrio.serving.interfaces import KSERVE_GRPC
from ovmstrio.telemetry.access_log import AccessLog, AccessLogFormat, RequestLog
from ovmstrio.telemetry.log_levels import LOGGER_ALIASES, LogLevel, format_log_levels, logger_name, parse_log_levels
from ovmstrio.telemetry.log_rate_limit import LogRateLimiter
from ovmstrio.telemetry.log_writer import DescriptorSink, LogOutlet, LogSink, LogWriter, StandardSink
from ovmstrio.telemetry.logs import configure_logs
from ovmstrio.telemetry.spans import UnrecordedSpan
from ovmstrio.util.truncation import CONTROLS, MOST_CHARACTERS
from tests.support.callers import LOCAL, REMOTE
from tests.support.waits import WAIT_SECONDS


@pytest.fixture
def path(tmp_path: Path) -> Path:
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


OURS, THEIRS = structlog.get_logger("ours"), logging.getLogger("theirs")


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize(
    "log",
    [
        pytest.param(lambda text: OURS.error(text, model="m"), id="event"),
        pytest.param(lambda text: OURS.error("model loaded", model=text), id="value"),
        pytest.param(lambda text: OURS.error("model loaded", model=_Shown(text)), id="object"),
        pytest.param(lambda text: OURS.error("model loaded", models=[{"name": _Shown(text)}]), id="nested"),
        pytest.param(lambda text: OURS.error("model loaded", **{text: 1}), id="key"),
        pytest.param(lambda text: logging.getLogger(f"x{text}").error("loaded"), id="logger"),
        pytest.param(THEIRS.error, id="standard"),
        pytest.param(lambda text: THEIRS.error("loaded %s", text), id="argument"),
    ],
)
def test_a_field_of_a_console_line_has_no_raw_control_characters(
    text: str, log: Callable[[str], None], path: Path
) -> None:
    configure_logs(path=path)
    log(text)
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
    text: str, form: AccessLogFormat, monkeypatch: pytest.MonkeyPatch
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


class _SlowSink(LogSink):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.threads: set[int] = set()
        self.is_open = threading.Event()
        self.is_closed = False

    def write(self, text: str) -> None:
        self.is_open.wait(60)
        self.threads.add(threading.get_ident())
        self.lines += text.split("\n")

    def give_up(self) -> None:
        self.lines.append("given up")
        self.is_open.set()

    def close(self) -> None:
        self.is_closed = True


def _logger_to(outlet: logging.Handler) -> logging.Logger:
    made = logging.Logger("test", logging.DEBUG)  # noqa: LOG001 - a logger that only this test uses
    made.addHandler(outlet)
    return made


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
    log.info("read %d", 7)
    assert sink.lines[-1] == "read 7"
    assert threading.get_ident() in sink.threads


async def test_lines_beyond_the_buffer_are_dropped_and_counted() -> None:
    sink, writer = _SlowSink(), LogWriter(max_characters=1000)
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


async def test_a_descriptor_that_fails_to_close_does_not_end_the_writer() -> None:
    sink, writer = _SlowSink(), LogWriter()
    sink.is_open.set()
    async with writer.in_thread():
        LogOutlet(DescriptorSink(1_000_000), writer).close()
        _logger_to(LogOutlet(sink, writer)).info("later")
    assert sink.lines == ["later"]


@contextmanager
def _stderr_pipe() -> Iterator[int]:
    """Make standard error a pipe; return its read end, which is never read."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with open(writing, "w", encoding="utf-8") as stream, pytest.MonkeyPatch.context() as patched:  # noqa: PTH123 - a descriptor
        patched.setattr(sys, "stderr", stream)
        patched.setattr(sys, "__stderr__", stream)
        yield reading
        os.close(reading)


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
    assert line["event"].startswith(f"log record not formatted: {__file__}: TypeError")


# Access log


SECRET = "s3cr3t"


def _access_line(form: AccessLogFormat, request: WireRequest) -> str:
    sink = _SlowSink()
    sink.is_open.set()
    AccessLog(form, LogOutlet(sink, LogWriter())).request_ended(request)
    (line,) = sink.lines
    assert SECRET not in line
    return line


def _request_over(protocol: WireProtocol, target: str, status: int, **headers: str) -> WireRequest:
    given = ((name.replace("_", "-"), value) for name, value in headers.items())
    pairs = [("authorization", f"Bearer {SECRET}"), *given]
    request = WireRequest(protocol, "POST", target, pairs, REMOTE)
    request.status, request.sent, request.received = status, 321, 123
    return request


CALL = "/inference.GRPCInferenceService/ModelInfer"


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (
            _request_over("HTTP", f"/m?key={SECRET}", 200, user_agent="curl/8", referer=f"http://x/?{SECRET}"),
            '"POST /m HTTP/1.1" 200 321 "http://x/" "curl/8"',
        ),
        (
            _request_over("HTTP", '/a"b\nc', 404, user_agent='x" 200 "\r\né'),
            r'"POST /a\x22b\x0ac HTTP/1.1" 404 321 "-" "x\x22 200 \x22\x0d\x0a\xe9"',
        ),
        *(
            (_request_over("gRPC", CALL, status), f'"POST {CALL} HTTP/2.0" {shown} 321 "-" "-"')
            for status, shown in ((0, 200), (5, 404), (8, 429), (13, 500), (-1, 499))
        ),
    ],
)
def test_a_combined_line_has_the_escaped_fields_of_web_servers_and_no_query(
    request_: WireRequest, expected: str
) -> None:
    match = re.fullmatch(r"10\.0\.0\.7 - - \[[^]]+\] (.*)", _access_line("combined", request_))
    assert match is not None
    assert match[1] == expected


def test_a_json_line_describes_the_call_of_its_request() -> None:
    request = _request_over("gRPC", "/inference.GRPCInferenceService/ModelInfer", 13)
    api_interface = ApiInterface("KServe", "gRPC", infer="ModelInfer")
    request.event = CallEvent("m", "3", "model", api_interface, "ModelInfer", "r7", caller="ann", code="ModelFailure")
    request.event.span = UnrecordedSpan(0xAB)
    line: dict[str, Any] = json.loads(_access_line("json", request))
    assert line.pop("milliseconds") >= 0
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "protocol": "gRPC",
        "client": "10.0.0.7",
        "caller": "ann",
        "method": "POST",
        "path": "/inference.GRPCInferenceService/ModelInfer",
        "status": "INTERNAL",
        "received": 123,
        "sent": 321,
        "user_agent": "",
        "name": "m",
        "version": "3",
        "kind": "model",
        "request_id": "r7",
        "code": "ModelFailure",
        "trace_id": f"{0xAB:032x}",
    }


def test_a_json_line_without_a_call_has_only_the_request() -> None:
    line = json.loads(_access_line("json", _request_over("HTTP", "/nowhere", -1)))
    assert line["status"] is None
    assert "name" not in line


# Levels


@pytest.fixture
def handler() -> logging.Handler:
    found = logging.Handler()
    logging.getLogger().addHandler(found)
    return found


def test_a_log_file_lowers_the_level_only_for_itself(handler: logging.Handler) -> None:
    level, root = LogLevel(), logging.getLogger()
    level.begin(logging.INFO, {})
    level.add_file_level(logging.DEBUG)
    assert (root.level, handler.level) == (logging.DEBUG, logging.INFO)
    level.set(logging.ERROR)
    assert (root.level, handler.level, level.value) == (logging.DEBUG, logging.ERROR, logging.ERROR)
    level.remove_file_level(logging.DEBUG)
    assert (root.level, handler.level) == (logging.ERROR, logging.NOTSET)


def test_loggers_with_a_floor_stay_at_it() -> None:
    level = LogLevel()
    level.begin(logging.INFO, {"a talkative one": logging.WARNING, "one of its own": logging.NOTSET})
    for now, talkative, own in ((logging.DEBUG, logging.WARNING, logging.DEBUG), (logging.ERROR,) * 3):
        level.set(now)
        assert logging.getLogger("a talkative one").level == talkative
        assert logging.getLogger("one of its own").level == own


GRAPH_LOGGER = "ovmstrio.graphs.instance"
REMOTE_LOGGER = "ovmstrio.remote.targets"


@pytest.fixture
def level() -> Iterator[LogLevel]:
    root = logging.getLogger().level
    level = LogLevel()
    level.begin(logging.INFO, {})
    try:
        yield level
    finally:
        level.set_logger_levels({})
        logging.getLogger().setLevel(root)


def test_levels_are_read_and_written() -> None:
    levels = parse_log_levels(" ovmstrio.graphs=DEBUG, httpx = error ,")
    assert levels == {"ovmstrio.graphs": logging.DEBUG, "httpx": logging.ERROR}
    assert format_log_levels(levels) == "ovmstrio.graphs=debug,httpx=error"
    assert parse_log_levels("") == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ovmstrio.graphs", "expected names and levels such as .*, got 'ovmstrio.graphs'"),
        ("=debug", "expected names and levels"),
        ("ovmstrio.graphs=loud", "ovmstrio.graphs: expected one of TRACE, DEBUG, .*, got 'loud'"),
        ("ovmstrio.grahps=debug", "unknown logger 'ovmstrio.grahps'; expected ovmstrio. and one of auth, cli, client"),
        ("ovmstrio.graphs.nowhere=debug", "unknown logger 'ovmstrio.graphs.nowhere'"),
        (f"ovmstrio.{'x' * 5000}=debug", "unknown logger 'ovmstrio.x"),
    ],
)
def test_an_invalid_setting_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_log_levels(text)


@pytest.mark.parametrize(
    "name",
    [
        *LOGGER_ALIASES,
        "ovmstrio",
        "ovmstrio.printed",
        "ovmstrio.access",
        "ovmstrio.generation",
        "ovmstrio.ops",
        "ovmstrio.http.router",
    ],
)
def test_every_logger_of_the_server_can_have_a_level(name: str) -> None:
    assert parse_log_levels(f"{name}=debug") == {name: logging.DEBUG}


def test_short_names_stand_for_packages() -> None:
    assert logger_name("ovmstrio.graphs.policies") == "ovmstrio.graphs.policies"
    assert logger_name("ovmstrio.grpc") == "ovmstrio.transport.grpc"
    assert logger_name("ovmstrio.generation.kind") == "ovmstrio.text.kind"
    assert logger_name("ovmstrio.graphsomething") == "ovmstrio.graphsomething"
    assert logger_name("httpx") == "httpx"


def test_a_level_of_a_part_overrides_the_general_level(level: LogLevel) -> None:
    level.set_logger_levels({"ovmstrio.graphs": logging.DEBUG})
    assert logging.getLogger(GRAPH_LOGGER).isEnabledFor(logging.DEBUG)
    assert not logging.getLogger(REMOTE_LOGGER).isEnabledFor(logging.DEBUG)
    level.set(logging.ERROR)
    assert logging.getLogger(GRAPH_LOGGER).isEnabledFor(logging.DEBUG)
    assert not logging.getLogger(REMOTE_LOGGER).isEnabledFor(logging.WARNING)
    level.set_logger_levels({"ovmstrio.remote": logging.INFO})
    assert not logging.getLogger(GRAPH_LOGGER).isEnabledFor(logging.WARNING)
    assert logging.getLogger(REMOTE_LOGGER).isEnabledFor(logging.INFO)


# Repeated faults


@asynccontextmanager
async def _repeated_faults(most: int = 10) -> AsyncIterator[tuple[LogRateLimiter, list[Any]]]:
    with capture_logs() as lines:
        async with trio.open_nursery() as nursery:
            faults = LogRateLimiter(structlog.get_logger("wire"), window_seconds=60, limit=most)
            nursery.start_soon(faults.log_repetitions)
            await trio.testing.wait_all_tasks_blocked()
            yield faults, lines
            nursery.cancel_scope.cancel()


async def test_repetitions_of_a_fault_are_one_line_per_minute(autojump_clock: trio.testing.MockClock) -> None:
    async with _repeated_faults() as (faults, lines):
        for port in range(1000):
            faults.log_fault("connection fault", peer=f"10.0.0.1:{port}", kind="PROTOCOL_ERROR", fault=f"frame {port}")
        await trio.sleep(59)
        (first,) = lines
        await trio.sleep(2)
    assert (first["event"], first["peer"], first["fault"]) == ("connection fault", "10.0.0.1:0", "frame 0")
    (second,) = lines[1:]
    assert second["event"] == "fault repeated"
    assert (second["fault"], second["peer"], second["kind"]) == ("connection fault", "10.0.0.1", "PROTOCOL_ERROR")
    assert (second["times"], second["seconds"]) == (999, 60)


async def test_peers_and_kinds_are_separate_and_a_later_fault_is_logged_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with _repeated_faults() as (faults, lines):
        faults.log_fault("tls handshake failed", peer="[::1]:50")
        faults.log_fault("tls handshake failed", peer="10.0.0.2:50")
        faults.log_fault("connection fault", peer="[::1]:51", kind="a")
        faults.log_fault("connection fault", peer="[::1]:52", kind="b")
        await trio.sleep(61)
        faults.log_fault("tls handshake failed", peer="[::1]:53")
    assert [line["peer"] for line in lines] == ["[::1]:50", "10.0.0.2:50", "[::1]:51", "[::1]:52", "[::1]:53"]
    assert all(line["log_level"] == "info" for line in lines)


async def test_addresses_without_ports_are_separate_peers() -> None:
    hosts = ["10.0.0.1", "::1", "2001:db8::5", "2001:db8::6", "[2001:db8::7]"]
    async with _repeated_faults() as (faults, lines):
        for host in (*hosts, *hosts):
            faults.log_fault("change refused", peer=host)
    logged = [(line["event"], line["peer"]) for line in lines]
    assert logged == [(event, host) for event in ("change refused", "fault repeated") for host in hosts]


async def test_peers_beyond_the_limit_are_counted_together() -> None:
    async with _repeated_faults(most=3) as (faults, lines):
        for number in range(100):
            faults.log_fault("tls handshake failed", peer=f"10.0.0.{number}:1")
    assert [line["peer"] for line in lines[:4]] == ["10.0.0.0:1", "10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"]
    (last,) = lines[4:]
    assert (last["peer"], last["times"]) == ("others", 96)


async def test_every_fault_is_logged_while_repetitions_are_not_reported() -> None:
    with capture_logs() as lines:
        faults = LogRateLimiter(structlog.get_logger("wire"))
        for _ in range(3):
            faults.log_fault("tls handshake failed", peer="10.0.0.1:1")
    assert [line["event"] for line in lines] == ["tls handshake failed"] * 3
