"""What a server remembers of its recent past for those who look at it: failed calls and lines of the log."""

from __future__ import annotations

import itertools
import logging
import time
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import ServerError
from ovmstrio.core.events import CANCELLED, CallObserver, kept_body_bytes
from ovmstrio.telemetry.log_writer import bounded_record
from ovmstrio.util.redaction import blanked
from ovmstrio.util.truncation import cut, text_of

if TYPE_CHECKING:
    from ovmstrio.core.events import CallEvent, RequestObserver, WireRequest

__all__ = ["FailedCall", "FailedCalls", "LogTail", "RecentPast", "TailLine"]

# ----------------------------------------------------------------------
# The calls that failed last, with where they failed; what was sent only if that was asked for at the start
# ----------------------------------------------------------------------

_MAX_FAILED_CALLS: Final = 100
_MAX_ERROR_CHARACTERS: Final = 600
_ZLIB_OR_GZIP: Final = 47
"""What zlib calls data that say themselves which of the two they are."""


@dataclass(frozen=True, slots=True)
class FailedCall:
    """One call that failed.

    Attributes:
        number: of all that failed, from 1.
        at: when it ended, in seconds since the epoch.
        name: of the service.
        version: of the service.
        kind: of the service.
        api: whose protocol it came by.
        interface: gRPC or REST.
        method: as the protocol calls it.
        request_id: that the caller gave, or was given.
        caller: whose call it was; empty where nobody had to be known.
        code: the name of the error's class.
        node: of the service in which it failed; empty where there is none, or it failed before.
        message: what was said of it, cut at 600 characters.
        milliseconds: how long it took.
        body: the begin of what was sent, without what looks like a secret; empty where that is not kept.
        body_bytes: how long all of it was; 0 where it is not kept.
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


class FailedCalls(CallObserver):
    """Observes calls, and keeps the last hundred that failed; those that their clients left are none.

    Of what was sent it keeps what :data:`ovmstrio.core.events.kept_body_bytes` has its requests have, where there are
    requests, which is up to :meth:`request_ended` being told of them.
    """

    def __init__(self) -> None:
        self._kept: deque[FailedCall] = deque(maxlen=_MAX_FAILED_CALLS)
        self.count = 0

    def since(self, number: int) -> list[FailedCall]:
        """Give those that are kept and came behind a number, oldest first."""
        return [each for each in self._kept if each.number > number]

    def call_failed(self, event: CallEvent) -> None:
        """Keep a call that failed, unless its client has left."""
        error = event.error
        if event.code == CANCELLED:
            return
        self.count += 1
        body, size = _sent(event.request)
        if error is None:
            told = event.reason or f"answered with the status {event.code}"
        else:
            told = error.message if isinstance(error, ServerError) else text_of(error)
        self._kept.append(
            FailedCall(
                number=self.count,
                at=time.time(),
                name=event.name,
                version=event.version,
                kind=event.kind,
                api=event.door.api,
                interface=event.door.interface,
                method=event.method,
                request_id=cut(event.request_id, _MAX_ERROR_CHARACTERS),
                caller=event.caller,
                code=event.code,
                node=event.node or getattr(error, "node", ""),
                message=cut(told, _MAX_ERROR_CHARACTERS),
                milliseconds=round(event.seconds * 1e3, 3),
                body=body,
                body_bytes=size,
            )
        )

    needs_every = True

    def samples(self, traceparent: str) -> bool | None:
        """Leave that to others."""
        del traceparent
        return False

    def request_ended(self, request: WireRequest) -> None:
        """What a call was asked with has been kept at its end."""


def _sent(request: WireRequest | None) -> tuple[str, int]:
    """Give what is kept of what was sent, and how long all of it was."""
    if request is None or not request.body:
        return "", 0
    kept, size = request.body, max(request.received, len(request.body))
    if request.header("content-encoding").strip().lower() not in {"", "identity"}:
        # Whoever sees what is compressed could read it, and nothing that is secret can be told in it.
        try:
            kept = zlib.decompressobj(_ZLIB_OR_GZIP).decompress(kept, max(kept_body_bytes.get(), len(kept)))
        except zlib.error:
            return "(compressed, and cannot be read)", size
    return blanked(kept, request.headers)[: len(kept)], size


# ----------------------------------------------------------------------
# The last lines of the log, for who looks at a server from afar
# ----------------------------------------------------------------------

_MAX_LOG_RECORDS: Final = 500
_MAX_MESSAGE_CHARACTERS: Final = 1000
_MOST_FACTS: Final = 24


@dataclass(frozen=True, slots=True)
class TailLine:
    """One line of the log.

    Attributes:
        number: of all lines, from 1.
        at: in seconds since the epoch.
        level: of ``logging``'s numbers.
        logger: who logged it.
        event: what was logged.
        facts: what belongs to it, by name; long values are cut.
    """

    number: int
    at: float
    level: int
    logger: str
    event: str
    facts: dict[str, str]


class LogTail(logging.Handler):
    """Keeps the last five hundred lines that the server logs; may be called by any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: deque[TailLine] = deque(maxlen=_MAX_LOG_RECORDS)
        self._numbers = itertools.count(1)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Keep what is logged while the block lasts."""
        root = logging.getLogger()
        root.addHandler(self)
        try:
            yield
        finally:
            root.removeHandler(self)

    def since(self, number: int) -> list[TailLine]:
        """Give those that are kept and came behind a number, oldest first."""
        return [each for each in tuple(self._kept) if each.number > number]

    def handle(self, record: logging.LogRecord) -> bool:
        """Keep a record, without the lock that others take."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record as text."""
        try:
            event, facts = _parts(bounded_record(record))
        except Exception as error:  # noqa: BLE001 - whatever users give to a logger, a line comes out
            event, facts = f"a line cannot be shown: {type(error).__name__}", {}
        line = TailLine(next(self._numbers), record.created, record.levelno, record.name, event, facts)
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
            for key, value in itertools.islice(message.items(), _MOST_FACTS)
            if key not in _NOT_FACTS
        }
    given: Any = message.get("exc_info") if isinstance(message, dict) else record.exc_info
    error = given[1] if isinstance(given, tuple) else given
    if isinstance(error, BaseException):
        facts["error"] = cut(f"{type(error).__name__}: {text_of(error)}", _MAX_MESSAGE_CHARACTERS)
    return cut(event, _MAX_MESSAGE_CHARACTERS), facts


_NOT_FACTS: Final = frozenset({"event", "level", "logger", "timestamp", "exc_info", "stack_info", "_record"})


# ----------------------------------------------------------------------
# What a server remembers of its recent past for those who look at it: failed calls and lines of the log
# ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecentPast:
    """Memories of one server, each of a bounded size.

    Attributes:
        body_bytes: how much is kept of the bodies of failed requests; 0 for nothing.
        failures: the calls that failed last.
        log: the last lines.
    """

    body_bytes: int = 0
    failures: FailedCalls = field(default_factory=FailedCalls)
    log: LogTail = field(default_factory=LogTail)

    @property
    def requests(self) -> tuple[RequestObserver, ...]:
        """Those who have to be told of requests, so that these have bodies."""
        return (self.failures,) if self.body_bytes else ()

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Take note of what happens while the block lasts, in the tasks that are started within it."""
        token = kept_body_bytes.set(self.body_bytes)
        try:
            with self.log.listening():
                yield
        finally:
            kept_body_bytes.reset(token)
