"""The access log: a line for each request, over gRPC as over HTTP, when it has been answered."""

from __future__ import annotations

import json
import logging
import re
import time
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Literal

import orjson
import structlog

from ovmstrio.core.callers import current_caller
from ovmstrio.core.errors import GRPC_STATUSES, ModelFailure, ServerError, http_status_of
from ovmstrio.core.events import OK, CallObserver
from ovmstrio.telemetry.log_writer import LogOutlet, StandardSink
from ovmstrio.telemetry.spans import span_of
from ovmstrio.util.truncation import CONTROLS, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ovmstrio.core.events import CallEvent, WireRequest

__all__ = ["AccessLog", "AccessLogForm", "RequestLog", "open_access_log"]

# ----------------------------------------------------------------------
# The access log: a line for each request, over gRPC as over HTTP, when it has been answered
# ----------------------------------------------------------------------

AccessLogForm = Literal["off", "json", "combined"]

_LONGEST: Final = 1024
_LEFT: Final = 499
"""What is said of a client that has left before it was answered, as other servers do."""
_UNSAFE: Final = re.compile(r"[^ !#-\[\]-~]")
_VERSIONS: Final = {"gRPC": "HTTP/2.0", "HTTP": "HTTP/1.1"}


class AccessLog:
    """Observes requests, and writes a line of each to standard output.

    What a request asks with, in its query, its other headers and its body, is left out, for there may be secrets in it.

    Args:
        form: ``combined``, as web servers have it, or ``json``, which tells more.
        outlet: gets the lines; standard output unless given.
    """

    def __init__(self, form: AccessLogForm, outlet: LogOutlet | None = None) -> None:
        self._outlet = LogOutlet(StandardSink("stdout")) if outlet is None else outlet
        self._outlet.setFormatter(logging.Formatter("%(message)s"))
        self._write = _json_line if form == "json" else _combined_line

    needs_every = True

    def samples(self, traceparent: str) -> bool | None:
        """Leave that to others."""
        del traceparent
        return False

    def request_ended(self, request: WireRequest) -> None:
        """Write the line of a request."""
        line = self._write(request)
        self._outlet.handle(logging.LogRecord(__name__, logging.INFO, "", 0, line, None, None))

    def close(self) -> None:
        """Close the outlet, behind what it has got."""
        self._outlet.close()


@contextmanager
def open_access_log(form: AccessLogForm) -> Iterator[tuple[AccessLog, ...]]:
    """Give the access log within the block, or nothing if it is off."""
    if form == "off":
        yield ()
        return
    with closing(AccessLog(form)) as log:
        yield (log,)


def _json_line(request: WireRequest) -> str:
    event = request.event
    document: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "protocol": request.protocol,
        "client": request.client.host,
        "caller": _caller(request),
        "method": request.method,
        "path": _path(request),
        "status": _status(request),
        "received": request.received or (0 if event is None else event.received),
        "sent": request.sent or (0 if event is None else event.sent),
        "milliseconds": round(_seconds(request) * 1e3, 3),
        "user_agent": request.header("user-agent")[:_LONGEST],
    }
    if event is not None:
        document |= {
            "name": event.name,
            "version": event.version,
            "kind": event.kind,
            "request_id": event.request_id,
            "code": event.code,
            "trace_id": "" if (span := span_of(event)) is None else span.trace_id,
        }
    try:
        line = orjson.dumps(document).decode()
    except TypeError:
        # Half of a surrogate pair is no UTF-8; the standard library escapes all that is not ASCII.
        line = json.dumps(document)
    # JSON itself leaves DEL, C1 and bidi overrides as they are; outside of strings there are none.
    if line.isprintable():
        return line
    return CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", line)


def _combined_line(request: WireRequest) -> str:
    status = request.status
    if status < 0:
        status = _LEFT
    elif request.protocol == "gRPC":
        status = http_status_of(status)
    now = time.localtime()
    asked = f"{_escaped(request.method)} {_escaped(_path(request))} {_VERSIONS[request.protocol]}"
    referer = _escaped(request.header("referer").partition("?")[0]) or "-"
    agent = _escaped(request.header("user-agent")) or "-"
    return (
        f"{request.client.host or '-'} - {_escaped(_caller(request)).replace(' ', '_') or '-'} "
        f'[{time.strftime("%d/%b/%Y:%H:%M:%S %z", now)}] "{asked}" {status} {request.sent} "{referer}" "{agent}"'
    )


def _status(request: WireRequest) -> int | str | None:
    """Give the status as its protocol calls it; None for who left."""
    if request.status < 0:
        return None
    return GRPC_STATUSES[request.status] if request.protocol == "gRPC" else request.status


def _caller(request: WireRequest) -> str:
    told = request.caller or ("" if request.event is None else request.event.caller)
    if told:
        return told
    caller = current_caller.get()
    return "" if caller is None else caller.name


def _path(request: WireRequest) -> str:
    return request.target.partition("?")[0][:_LONGEST]


def _seconds(request: WireRequest) -> float:
    event = request.event
    began = request.started if event is None or request.is_stream else min(request.started, event.started)
    return perf_counter() - began


def _escaped(text: str) -> str:
    """Keep who asks from writing anything into the log but their own field."""
    return _UNSAFE.sub(lambda match: f"\\x{ord(match[0]):02x}", text[:_LONGEST])


# ----------------------------------------------------------------------
# A log line for each request: quiet for those that succeed, loud for failures that are the server's
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)
_LEVEL: Final = logging.getLogger(__name__)
"""Tells what is logged at the time, without making a line of it."""


class RequestLog(CallObserver):
    """Observes calls and logs their ends."""

    def call_finished(self, event: CallEvent) -> None:
        """Log success and the caller's mistakes at debug level, failures of services or the server at error level."""
        error = event.error
        if event.code != OK and _is_failure(event):
            log.error("request failed", **_facts(event), exc_info=error)
        elif not _LEVEL.isEnabledFor(logging.DEBUG):
            return
        elif event.code == OK:
            log.debug("request", **_facts(event))
        else:
            log.debug("request refused", **_facts(event), reason=text_of(error) if error else event.reason)


def _is_failure(event: CallEvent) -> bool:
    """Tell whether an error is the server's; one with a code that is not its name was judged by who answered."""
    error = event.error
    if not isinstance(error, Exception) or event.code != type(error).__name__:
        return False
    return isinstance(error, ModelFailure) or not isinstance(error, ServerError)


def _facts(event: CallEvent) -> dict[str, object]:
    whose = {"caller": event.caller} if event.caller else {}
    return {
        **whose,
        "model": event.name,
        "version": event.version,
        "kind": event.kind,
        "api": event.door.api,
        "method": event.method,
        "interface": event.door.interface,
        "request_id": event.request_id,
        "code": event.code,
        "milliseconds": round(event.seconds * 1e3, 3),
        "queue_milliseconds": round(event.queue_seconds * 1e3, 3),
        "compute_milliseconds": round(event.compute_seconds * 1e3, 3),
        "received": event.received,
        "sent": event.sent,
    }
