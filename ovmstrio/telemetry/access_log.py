"""Access log and request log."""

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
from ovmstrio.telemetry.spans import event_span
from ovmstrio.util.truncation import CONTROLS, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ovmstrio.core.events import CallEvent, WireRequest

# Access log

AccessLogFormat = Literal["off", "json", "combined"]

_LONGEST: Final = 1024
_CLIENT_CLOSED: Final = 499
"""Status for a client that disconnected, as in nginx."""
_UNSAFE: Final = re.compile(r"[^ !#-\[\]-~]")
_VERSIONS: Final = {"gRPC": "HTTP/2.0", "HTTP": "HTTP/1.1"}


class AccessLog:
    """Request observer that writes one line per request to standard output.

    Query strings, other headers and bodies are omitted, as they may contain secrets.

    Args:
        form: ``combined`` (Apache format) or ``json`` (more fields).
        outlet: receives the lines; standard output by default.
    """

    def __init__(self, form: AccessLogFormat, outlet: LogOutlet | None = None) -> None:
        self._outlet = LogOutlet(StandardSink("stdout")) if outlet is None else outlet
        self._outlet.setFormatter(logging.Formatter("%(message)s"))
        self._write = _json_line if form == "json" else _combined_line

    needs_every = True
    body_bytes = 0

    def samples(self, traceparent: str) -> bool | None:
        """Return False: no request is sampled."""
        del traceparent
        return False

    def request_ended(self, request: WireRequest) -> None:
        """Write the line of a request."""
        line = self._write(request)
        self._outlet.handle(logging.LogRecord(__name__, logging.INFO, "", 0, line, None, None))

    def close(self) -> None:
        """Close the outlet after the queued lines."""
        self._outlet.close()


@contextmanager
def open_access_log(form: AccessLogFormat) -> Iterator[tuple[AccessLog, ...]]:
    """Open the access log within the block; yields nothing if it is off."""
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
        "request_id": "" if request.request_id is None else request.request_id.value,
    }
    if event is not None:
        document |= {
            "name": event.name,
            "version": event.version,
            "kind": event.kind,
            "request_id": event.request_id,
            "code": event.code,
            "trace_id": "" if (span := event_span(event)) is None else span.trace_id,
        }
    try:
        line = orjson.dumps(document).decode()
    except TypeError:
        # Lone surrogates are not valid UTF-8; the standard library escapes all non-ASCII characters.
        line = json.dumps(document)
    # JSON does not escape DEL, C1 and bidi overrides.
    if line.isprintable():
        return line
    return CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", line)


def _combined_line(request: WireRequest) -> str:
    status = request.status
    if status < 0:
        status = _CLIENT_CLOSED
    elif request.protocol == "gRPC":
        status = http_status_of(status)
    now = time.localtime()
    request_line = f"{_escaped(request.method)} {_escaped(_path(request))} {_VERSIONS[request.protocol]}"
    referer = _escaped(request.header("referer").partition("?")[0]) or "-"
    agent = _escaped(request.header("user-agent")) or "-"
    return (
        f"{request.client.host or '-'} - {_escaped(_caller(request)).replace(' ', '_') or '-'} "
        f'[{time.strftime("%d/%b/%Y:%H:%M:%S %z", now)}] "{request_line}" {status} {request.sent} "{referer}" "{agent}"'
    )


def _status(request: WireRequest) -> int | str | None:
    if request.status < 0:
        return None
    return GRPC_STATUSES[request.status] if request.protocol == "gRPC" else request.status


def _caller(request: WireRequest) -> str:
    name = request.caller or ("" if request.event is None else request.event.caller)
    if name:
        return name
    caller = current_caller.get()
    return "" if caller is None else caller.name


def _path(request: WireRequest) -> str:
    return request.target.partition("?")[0][:_LONGEST]


def _seconds(request: WireRequest) -> float:
    event = request.event
    began = request.started if event is None or request.is_stream else min(request.started, event.started)
    return perf_counter() - began


def _escaped(text: str) -> str:
    """Escape characters with which a client could forge other log fields."""
    return _UNSAFE.sub(lambda match: f"\\x{ord(match[0]):02x}", text[:_LONGEST])


# Request log

log = structlog.get_logger(__name__)
_LOGGER: Final = logging.getLogger(__name__)
"""Cheap level check."""


class RequestLog(CallObserver):
    """Call observer that logs the end of each call."""

    def call_finished(self, event: CallEvent) -> None:
        """Log successes and client errors at debug level, failures of services or the server at error level."""
        error = event.error
        if event.code != OK and _is_failure(event):
            log.error("request failed", **_facts(event), exc_info=error)
        elif not _LOGGER.isEnabledFor(logging.DEBUG):
            return
        elif event.code == OK:
            log.debug("request", **_facts(event))
        else:
            log.debug("request refused", **_facts(event), reason=text_of(error) if error else event.reason)


def _is_failure(event: CallEvent) -> bool:
    """Return whether an error is a server error; False if the front end set another code."""
    error = event.error
    if not isinstance(error, Exception) or event.code != type(error).__name__:
        return False
    return isinstance(error, ModelFailure) or not isinstance(error, ServerError)


def _facts(event: CallEvent) -> dict[str, object]:
    caller = {"caller": event.caller} if event.caller else {}
    return {
        **caller,
        "model": event.name,
        "version": event.version,
        "kind": event.kind,
        "api": event.api_interface.api,
        "method": event.method,
        "interface": event.api_interface.interface,
        "request_id": event.request_id,
        "code": event.code,
        "milliseconds": round(event.seconds * 1e3, 3),
        "queue_milliseconds": round(event.queue_seconds * 1e3, 3),
        "compute_milliseconds": round(event.compute_seconds * 1e3, 3),
        "received": event.received,
        "sent": event.sent,
    }
