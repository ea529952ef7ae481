"""Messages of worker processes that their programs do not see: stack samples, log levels and log records.

::

    server                                     process
    [SAMPLING_REQUEST, [number, seconds, rate]] ──> samples in a thread
             <── [SAMPLING_REQUEST, [number, document or error text]]
    [LOG_LEVELS, {logger: level}] ────────────────> sets its loggers, at the start and after each change
             <── [LOG_RECORD, record]

The reader of a process's messages handles them itself, concurrently with its requests. A busy or starting process may
answer late; the number identifies the request. The module needs only what messages need.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final

from ovmstrio.core.service import SampledThreads, StackFrame
from ovmstrio.isolation.messages import decode_error, encode_error, encode_inline
from ovmstrio.telemetry.stack_sampling import StackSampler
from ovmstrio.util.truncation import cut, format_error, text_of

# ----------------------------------------------------------------------
# Stack samples
# ----------------------------------------------------------------------

SAMPLING_REQUEST: Final = -1
"""Number that marks sampling requests."""

_DIGITS: Final = "0123456789"
_MAX_STACKS: Final = 4_000


def side_message_kind(value: object) -> int:
    """Return the number that marks a side message; 0 for the program's own messages."""
    if isinstance(value, list | tuple) and value and type(value[0]) is int and value[0] < 0:
        return value[0]
    return 0


def create_process_sampler(rate: float) -> StackSampler:
    """Create a sampler of all threads except the sampling one."""
    main = threading.main_thread().ident

    def role(number: int, name: str, _: frozenset[str]) -> str:
        if number == main:
            return "main thread"
        return name.partition(" from ")[0].partition(" (")[0].rstrip(_DIGITS).rstrip(" -_") or "native threads"

    return StackSampler(rate, role, max_stacks=_MAX_STACKS)


def sample_in_thread(message: Any, send: Callable[[Any], None]) -> None:
    """Sample in a thread as ``message`` and send the result; ``send`` must be thread-safe."""
    number, seconds, rate = message[1]

    def run() -> None:
        send([SAMPLING_REQUEST, [number, encode_samples(create_process_sampler(rate).run(seconds))]])

    try:
        threading.Thread(target=run, name="profile", daemon=True).start()
    except RuntimeError as error:
        # No thread can be started; that is no reason to exit.
        send([SAMPLING_REQUEST, [number, str(error)]])


def encode_samples(sampled: list[SampledThreads]) -> dict[str, Any]:
    """Return samples as plain data, with each frame once."""
    numbers: dict[StackFrame, int] = {}
    threads = []
    for each in sampled:
        counted = each.stacks.items()
        stacks = [[[numbers.setdefault(frame, len(numbers)) for frame in stack], count] for stack, count in counted]
        threads.append([each.name, each.samples, each.waiting, each.cpu_seconds, stacks])
    return {"frames": [[frame.name, frame.file, frame.line] for frame in numbers], "threads": threads}


def decode_samples(document: Any) -> list[SampledThreads]:
    """Decode the data of :func:`encode_samples`; raises ``ValueError`` if it is malformed or an error text."""
    if isinstance(document, str):
        raise ValueError(f"its threads could not be sampled: {document}")  # noqa: TRY004 - an error text, not a type error
    try:
        frames = [StackFrame(str(name), str(file), int(line)) for name, file, line in document["frames"]]
        return [
            SampledThreads(
                str(name),
                int(samples),
                int(waiting),
                None if cpu is None else float(cpu),
                Counter({tuple(frames[number] for number in stack): int(count) for stack, count in stacks}),
            )
            for name, samples, waiting, cpu, stacks in document["threads"]
        ]
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"malformed stack samples: {error!r}") from None


# ----------------------------------------------------------------------
# Log records
# ----------------------------------------------------------------------

LOG_LEVELS: Final = -2
"""Number that marks messages with the levels of loggers."""

LOG_RECORD: Final = -3
"""Number that marks log records."""

_PLACE: Final = ("name", "levelno", "levelname", "pathname", "filename", "module", "lineno", "funcName")
_ORIGIN: Final = ("created", "msecs", "process", "threadName")
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "_logger", "_name"}
_PLAIN: Final = (bool, int, float, type(None))
_MAX_WAITING_BYTES: Final = 4 << 20
"""Bytes of records that may wait while the server is busy; further records are dropped."""
_POLL_SECONDS: Final = 0.005
_FLUSH_SECONDS: Final = 1.0

CALL_IDS: Final[ContextVar[Mapping[str, str]]] = ContextVar("call ids", default=MappingProxyType({}))
"""Fields that identify the server's call which the user code serves: request id, trace id and span id."""


def apply_log_levels(levels: Mapping[str, int]) -> None:
    """Set the levels of loggers; the root logger has an empty name."""
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


class RecordForwarder(logging.Handler):
    """Handler that sends records to the server.  It never blocks: while the server is busy, records wait.

    A warning after the waiting records counts the dropped ones.  ``send_now`` sends a packet without blocking, in any
    thread, and returns whether it was sent.
    """

    def __init__(self, send_now: Callable[[bytes], bool]) -> None:
        super().__init__()
        self._send_now = send_now
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._dropped = 0
        self._sender: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, or let it wait."""
        try:
            packet = _encode_record(record)
        except Exception:  # noqa: BLE001 - user code formats the message
            self.handleError(record)
            return
        if self._has_sent_all() and self._send_now(packet):
            return
        if self._waiting_bytes + len(packet) > _MAX_WAITING_BYTES:
            self._dropped += 1
            return
        self._waiting.append(packet)
        self._waiting_bytes += len(packet)
        if self._sender is None:
            self._start_sender()

    def flush(self) -> None:
        """Wait for at most a second until no records wait."""
        if (sender := self._sender) is not None:
            sender.join(_FLUSH_SECONDS)

    def _has_sent_all(self) -> bool:
        """Send waiting records, and return whether none is left; the caller holds the handler's lock."""
        while self._waiting:
            if not self._send_now(self._waiting[0]):
                return False
            self._waiting_bytes -= len(self._waiting.popleft())
            if not self._waiting and self._dropped:
                self._waiting.append(_dropped_packet(self._dropped))
                self._waiting_bytes += len(self._waiting[0])
                self._dropped = 0
        return True

    def _start_sender(self) -> None:
        self._sender = threading.Thread(target=self._send_waiting, name="log records", daemon=True)
        try:
            self._sender.start()
        except RuntimeError:  # no thread can be started: the next record sends those that wait
            self._sender = None

    def _send_waiting(self) -> None:
        while True:
            self.acquire()
            try:
                if self._has_sent_all():
                    self._sender = None
                    return
            finally:
                self.release()
            time.sleep(_POLL_SECONDS)


def flush_records() -> None:
    """Wait for at most a second until the records of this process are sent."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, RecordForwarder):
            handler.flush()


def _dropped_packet(count: int) -> bytes:
    name, place = "ovmstrio.isolation", ("", 0)
    record = logging.LogRecord(name, logging.WARNING, *place, "log records dropped", None, None)
    record.count = count
    return _encode_record(record)


def _encode_record(record: logging.LogRecord) -> bytes:
    """Return the packet of a record; one that is too large loses its fields and the structure of its error."""
    message, error = record.msg, record.exc_info[1] if record.exc_info else None
    ids = CALL_IDS.get()
    if isinstance(message, dict):  # structlog passes the event
        error = _error_of(message.get("exc_info"))
        message = {**ids, **{name: _plain(value) for name, value in message.items() if name != "exc_info"}}
    else:
        message = cut(record.getMessage())
    row = {name: getattr(record, name) for name in (*_PLACE, *_ORIGIN)}
    row["msg"], row["stack_info"] = message, record.stack_info
    given = {name: _plain(value) for name, value in vars(record).items() if name not in _STANDARD}
    fields = {**ids, **given}
    packet = encode_inline([LOG_RECORD, [row, fields, None if error is None else encode_error(error)]])
    if packet is None:
        text = message.get("event", "") if isinstance(message, dict) else message
        text = str(text) if error is None else f"{text}\n{cut(format_error(error))}"
        packet = encode_inline([LOG_RECORD, [{**row, "msg": cut(text), "stack_info": None}, {**ids}, None]])
    return packet or b""


def _error_of(info: Any) -> BaseException | None:
    """Return the exception of structlog's ``exc_info``."""
    if isinstance(info, tuple):
        info = info[1]
    if isinstance(info, BaseException):
        return info
    return sys.exc_info()[1] if info else None


def _plain(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if type(value) is str:
        return cut(value)
    if type(value) in {list, tuple}:
        return [_plain(one) for one in value]
    if type(value) is dict:
        return {str(name): _plain(one) for name, one in value.items()}
    return text_of(value) if isinstance(value, BaseException) else cut(str(value))


def decode_record(row: Any) -> tuple[logging.LogRecord, dict[str, Any]] | None:
    """Return a record and its additional fields; None if the level of its logger is higher.

    Raises ``MALFORMED_MESSAGE_ERRORS`` exceptions if it is malformed.
    """
    attributes, fields, encoded = row
    if not logging.getLogger(attributes["name"]).isEnabledFor(attributes["levelno"]):
        return None
    record = logging.makeLogRecord({**fields, **attributes})
    error = None if encoded is None else decode_error(encoded)
    info = None if error is None else (type(error), error, error.__traceback__)
    if isinstance(record.msg, dict):
        # These attributes mark an event of structlog.
        record.__dict__ |= {"_logger": None, "_name": record.levelname.lower()}
        if info is not None:
            record.msg["exc_info"] = info
    else:
        record.exc_info = info
    return record, fields
