"""Ring buffers for the console: recent failed calls and log lines."""

from __future__ import annotations

import itertools
import logging
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import ServerError
from ovmstrio.core.events import CANCELLED, CallObserver
from ovmstrio.telemetry.log_writer import bounded_record
from ovmstrio.util.truncation import cut, text_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ovmstrio.core.events import CallEvent, RequestObserver, WireRequest

# Failed calls

_MAX_FAILED_CALLS: Final = 100
_MAX_FAILURE_GROUPS: Final = 100
_MAX_ERROR_CHARACTERS: Final = 600
_ZLIB_OR_GZIP: Final = 47
"""``wbits`` of zlib for automatic detection of zlib or gzip."""


@dataclass(frozen=True, slots=True)
class FailedCall:
    """One failed call.

    Attributes:
        number: sequence number of the failure, from 1.
        at: end of the call, seconds since the epoch.
        caller: name of the caller; empty if unauthenticated.
        code: class name of the error.
        node: failed node of the service, or empty.
        message: error message, truncated to 600 characters.
        body: start of the request body with secrets redacted; empty if not kept.
        body_bytes: size of the request body; 0 if not kept.
    """

    number: int
    at: float
    name: str
    version: str
    kind: str
    api: str
    interface: str
    method: str
    request_id: str
    caller: str
    code: str
    node: str
    message: str
    milliseconds: float
    body: str = ""
    body_bytes: int = 0


@dataclass(slots=True)
class FailureGroup:
    """Failed calls of one service with the same error.

    Attributes:
        code: class name of the error.
        node: failed node of the service, or empty.
        count: number of failed calls since the start of the process.
        first: time of the first of them, seconds since the epoch.
        last: time of the last of them.
        message: message of the last of them.
    """

    name: str
    kind: str
    code: str
    node: str
    count: int
    first: float
    last: float
    message: str


class FailedCalls(CallObserver):
    """Observer that keeps the last 100 failed calls, without client disconnects, and counts them in groups.

    A group has a service, an error class and a node; the 100 groups that failed last are kept.

    Up to ``body_bytes`` of request bodies are kept, if requests are observed.
    """

    def __init__(self, body_bytes: int = 0) -> None:
        self.body_bytes = body_bytes
        self._kept: deque[FailedCall] = deque(maxlen=_MAX_FAILED_CALLS)
        self._groups: OrderedDict[tuple[str, str, str], FailureGroup] = OrderedDict()
        self.count = 0

    @property
    def groups(self) -> list[FailureGroup]:
        """Groups, the last failed one first."""
        return list(reversed(self._groups.values()))

    def since(self, number: int) -> list[FailedCall]:
        """Return kept failures after a sequence number, oldest first."""
        return [each for each in self._kept if each.number > number]

    def call_failed(self, event: CallEvent) -> None:
        """Keep a failed call, unless the client disconnected."""
        error = event.error
        if event.code == CANCELLED:
            return
        self.count += 1
        body, size = _kept_body(event.request, self.body_bytes)
        if error is None:
            message = event.reason or f"status {event.code}"
        else:
            message = error.message if isinstance(error, ServerError) else text_of(error)
        failed = FailedCall(
            number=self.count,
            at=time.time(),
            name=event.name,
            version=event.version,
            kind=event.kind,
            api=event.api_interface.api,
            interface=event.api_interface.interface,
            method=event.method,
            request_id=cut(event.request_id, _MAX_ERROR_CHARACTERS),
            caller=event.caller,
            code=event.code,
            node=event.node or getattr(error, "node", ""),
            message=cut(message, _MAX_ERROR_CHARACTERS),
            milliseconds=round(event.seconds * 1e3, 3),
            body=body,
            body_bytes=size,
        )
        self._kept.append(failed)
        self._add_to_group(failed)

    def _add_to_group(self, failed: FailedCall) -> None:
        key = failed.name, failed.code, failed.node
        group = self._groups.get(key)
        if group is None:
            group = FailureGroup(
                failed.name, failed.kind, failed.code, failed.node, 0, failed.at, failed.at, failed.message
            )
            self._groups[key] = group
            if len(self._groups) > _MAX_FAILURE_GROUPS:
                self._groups.popitem(last=False)
        group.count += 1
        group.last, group.message = failed.at, failed.message
        self._groups.move_to_end(key)

    needs_every = True

    def samples(self, traceparent: str) -> bool | None:
        """Return False: no request is sampled."""
        del traceparent
        return False

    def request_ended(self, request: WireRequest) -> None:
        """Do nothing: bodies are kept with their calls."""


def _kept_body(request: WireRequest | None, body_bytes: int) -> tuple[str, int]:
    if request is None or not request.body:
        return "", 0
    kept, size = request.body, max(request.received, len(request.body))
    if request.header("content-encoding").strip().lower() not in {"", "identity"}:
        # Decompress, as secrets cannot be redacted in compressed data.
        try:
            kept = zlib.decompressobj(_ZLIB_OR_GZIP).decompress(kept, max(body_bytes, len(kept)))
        except zlib.error:
            return "(compressed body, decompression failed)", size
    from ovmstrio.util.redaction import blanked  # noqa: PLC0415 - its patterns take 3 ms of each start

    return blanked(kept, request.headers)[: len(kept)], size


# Log lines

_MAX_LOG_RECORDS: Final = 500
_MAX_MESSAGE_CHARACTERS: Final = 1000
_MAX_FACTS: Final = 24


@dataclass(frozen=True, slots=True)
class LogLine:
    """One log line.

    Attributes:
        number: sequence number, from 1.
        at: seconds since the epoch.
        facts: fields by name; long values are truncated.
    """

    number: int
    at: float
    level: int
    logger: str
    event: str
    facts: dict[str, str]


class RecentLog(logging.Handler):
    """Logging handler that keeps the last 500 lines; thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: deque[LogLine] = deque(maxlen=_MAX_LOG_RECORDS)
        self._numbers = itertools.count(1)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Keep log lines within the block."""
        root = logging.getLogger()
        root.addHandler(self)
        try:
            yield
        finally:
            root.removeHandler(self)

    def since(self, number: int) -> list[LogLine]:
        """Return kept lines after a sequence number, oldest first."""
        return [each for each in tuple(self._kept) if each.number > number]

    def handle(self, record: logging.LogRecord) -> bool:
        """Keep a record without the handler lock."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record as text."""
        try:
            event, facts = _parts(bounded_record(record))
        except Exception as error:  # noqa: BLE001 - any log arguments must give a line
            event, facts = f"log record not formatted: {type(error).__name__}", {}
        line = LogLine(next(self._numbers), record.created, record.levelno, record.name, event, facts)
        self._kept.append(line)


def _parts(record: logging.LogRecord) -> tuple[str, dict[str, str]]:
    message: Any = record.msg
    if not isinstance(message, dict):
        facts = {}
        event = record.getMessage()
    else:
        event = str(message.get("event", ""))
        facts = {
            str(key): cut(str(value), _MAX_MESSAGE_CHARACTERS)
            for key, value in itertools.islice(message.items(), _MAX_FACTS)
            if key not in _NOT_FACTS
        }
    given: Any = message.get("exc_info") if isinstance(message, dict) else record.exc_info
    error = given[1] if isinstance(given, tuple) else given
    if isinstance(error, BaseException):
        facts["error"] = cut(f"{type(error).__name__}: {text_of(error)}", _MAX_MESSAGE_CHARACTERS)
    return cut(event, _MAX_MESSAGE_CHARACTERS), facts


_NOT_FACTS: Final = frozenset({"event", "level", "logger", "timestamp", "exc_info", "stack_info", "_record"})


# Recent history


class RecentHistory:
    """Ring buffers of one server.

    Args:
        body_bytes: bytes kept of the bodies of failed requests; 0 for none.

    Attributes:
        sample: task that samples the console's time series until cancelled; None without a console.
    """

    def __init__(self, body_bytes: int = 0) -> None:
        self.failures = FailedCalls(body_bytes)
        self.log = RecentLog()
        self.sample: Callable[[], Awaitable[None]] | None = None

    @property
    def requests(self) -> tuple[RequestObserver, ...]:
        """Request observers needed to keep bodies."""
        return (self.failures,) if self.failures.body_bytes else ()
