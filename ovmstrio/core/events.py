"""Call events: one record per call of a service, whatever its protocol, and the observers that receive them.

The data plane creates a :class:`CallEvent` for every call of an existing service.  Metrics and access log are
observers of these events.  Transports create a :class:`WireRequest` for every request if there are request observers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from random import getrandbits
from time import perf_counter
from typing import Final, Literal, Protocol

from ovmstrio.core.connection import ClientAddress, Peer
from ovmstrio.core.errors import ServerError
from ovmstrio.core.tracing import Span

Interface = Literal["gRPC", "REST"]
WireProtocol = Literal["gRPC", "HTTP"]

OK: Final = "OK"
CANCELLED: Final = "Cancelled"

QUERY_METHODS: Final = frozenset({"ModelMetadata", "ModelReady", "GetModelMetadata", "GetModelStatus"})
"""Methods that query a service; all other methods run it."""


def unchanged(error: ServerError, _method: str) -> ServerError:
    """Return the error unchanged."""
    return error


@dataclass(frozen=True, slots=True, eq=False)
class ApiInterface:
    """API and transport of a call, with the API's method names.

    ``words`` maps a lookup error and the method name to the API's own error text.  Compared by identity, as calls are
    counted per instance.
    """

    api: str
    interface: Interface
    infer: str = ""
    stream: str = ""
    metadata: str = ""
    ready: str = ""
    status: str = ""
    words: Callable[[ServerError, str], ServerError] = unchanged


class RequestId:
    """Id of a request: that of the client's header ``x-request-id``, that of its message, or a new one.

    Attributes:
        is_sent: whether the client sent the header, which precedes ids in messages.
    """

    __slots__ = ("is_sent", "value")

    def __init__(self, headers: Iterable[tuple[str, str]]) -> None:
        # A plain loop: a generator would double the cost of a request without the header.
        for name, value in headers:
            if name == REQUEST_ID_HEADER:
                self.is_sent = _SAFE_ID(value) is not None
                self.value = value if self.is_sent else _new_id()
                return
        self.is_sent, self.value = False, _new_id()

    def settle(self, given: str) -> str:
        """Return the id of a call whose message has the id ``given``, or an empty string."""
        if given and not self.is_sent:
            if _SAFE_ID(given):
                self.value = given
            return given
        return self.value


def _new_id() -> str:
    return f"{getrandbits(64):016x}"


REQUEST_ID_HEADER: Final = "x-request-id"
_SAFE_ID: Final = re.compile(r"[!-~]{1,128}").fullmatch

current_request_id: Final[ContextVar[RequestId | None]] = ContextVar("current_request_id", default=None)
"""The id of the running task's request; None without a request."""


class WireRequest:
    """One HTTP or gRPC request.

    Attributes:
        target: request target or gRPC path, as sent.
        route: path template of an HTTP request, such as ``/v2/models/{model}``; empty if the service routes its paths.
        caller: name of the caller; empty if unauthenticated or while it is the running task's caller.
        started: ``time.perf_counter`` time.
        status: gRPC or HTTP status; -1 while running and for clients that disconnected.
        is_stream: whether the request may contain several messages, each a call.
        body: start of the body or of the last message, up to ``body_bytes`` of the observer.
        received: received body bytes or messages.
        request_id: id of the request.
        sent: sent body bytes or messages.
        event: the last call of the request; None for unknown services and after the end was reported (a call refers to
            its
            request, so this breaks the cycle).
        traceparent: ``traceparent`` header; None if not extracted yet.
        is_sampled: sampling decision for a call without parent span; None if not decided.
    """

    __slots__ = (
        "body",
        "caller",
        "event",
        "headers",
        "is_sampled",
        "is_stream",
        "method",
        "peer",
        "protocol",
        "received",
        "request_id",
        "route",
        "sent",
        "started",
        "status",
        "target",
        "traceparent",
    )

    def __init__(
        self, protocol: WireProtocol, method: str, target: str, headers: Iterable[tuple[str, str]], peer: Peer
    ) -> None:
        self.protocol = protocol
        self.method = method
        self.target = target
        self.headers = headers
        self.peer = peer
        self.body = b""
        self.route = ""
        self.request_id = current_request_id.get()
        self.caller = ""
        self.started = perf_counter()
        self.status = -1
        self.is_stream = False
        self.received = self.sent = 0
        self.event: CallEvent | None = None
        self.traceparent: str | None = None
        self.is_sampled: bool | None = None

    @property
    def client(self) -> ClientAddress:
        """Client address, derived from the peer and forwarding headers."""
        return self.peer.client(self.headers)

    @property
    def record(self) -> WireRequest:
        """As :class:`CurrentRequest`."""
        return self

    def header(self, name: str) -> str:
        """Return the first header with a lower-case name, or an empty string."""
        for key, value in self.headers:
            if key == name:
                return value
        return ""


class StreamProgress(Enum):
    """Progress of a stream call."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    ANSWERED = "answered"


@dataclass(slots=True, eq=False)
class CallEvent:
    """One call of a service that exists.

    Attributes:
        version: number of the version; empty for queries without version.
        method: method name of the API.
        caller: name of the caller; empty if unauthenticated.
        trace_id: id of the sampled trace, or empty.
        received: received body bytes or messages.
        sent: sent body bytes or messages.
        queue_seconds: queueing time, as far as the service reports it.
        compute_seconds: compute time.
        is_read: whether the body could be parsed.
        started: ``time.perf_counter`` time.
        seconds: duration; 0 while running.
        code: :data:`OK`, :data:`CANCELLED` or the error class; empty while running.
        reason: details of a failure that was answered normally.
        node: failed node of the service, if known.
        error_type: type of the exception of a failure that was answered normally, if known.
        request: the request; None without request observers.
        span: the span of the call; None if not traced or not recorded.
        make_span: creates the span of an unrecorded call, for its ids; None without tracing.
    """

    name: str
    version: str
    kind: str
    api_interface: ApiInterface
    method: str
    request_id: str = ""
    received: int = 0
    sent: int = 0
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    is_read: bool = True
    started: float = field(default_factory=perf_counter)
    seconds: float = 0.0
    code: str = ""
    error: BaseException | None = None
    reason: str = ""
    node: str = ""
    error_type: str = ""
    caller: str = ""
    trace_id: str = ""
    request: WireRequest | None = None
    span: Span | None = None
    make_span: Callable[[], Span] | None = None


current_event: Final[ContextVar[CallEvent | None]] = ContextVar("current_event", default=None)
"""The running call, for log records."""


class CallObserver(Protocol):
    """Observer of calls; methods must neither block nor raise.

    Subclasses are only called for the methods that they override.
    """

    def call_started(self, event: CallEvent) -> None:
        """Handle the start of a call."""
        del event

    def call_moved(self, event: CallEvent, step: StreamProgress) -> None:
        """Handle progress of a stream call."""
        del event, step

    def call_finished(self, event: CallEvent) -> None:
        """Handle the end of a call."""
        del event

    def call_failed(self, event: CallEvent) -> None:
        """Handle the end of a failed call, after :meth:`call_finished` of all observers."""
        del event


class CurrentRequest(Protocol):
    """The request of a task.

    Attributes:
        event: the last call of the request, if any.
    """

    event: CallEvent | None

    @property
    def record(self) -> WireRequest | None:
        """The record for observers; None if no observer needs it before the end of the request."""


class RequestObserver(Protocol):
    """Observer of requests; methods must neither block nor raise."""

    @property
    def needs_every(self) -> bool:
        """True if every request is observed, instead of sampled and failed ones."""

    @property
    def body_bytes(self) -> int:
        """Bytes of a request body that the observer needs; 0 for none."""

    def samples(self, traceparent: str) -> bool | None:
        """Return the sampling decision at the start of a request; None if it depends on further headers."""

    def request_ended(self, request: WireRequest) -> None:
        """Handle the end of a request, answered or disconnected."""


class _ObserverGroup:
    def __init__(self, observers: Sequence[RequestObserver]) -> None:
        self._observers = tuple(observers)
        self.needs_every = any(each.needs_every for each in observers)
        self.body_bytes = max(each.body_bytes for each in observers)

    def samples(self, traceparent: str) -> bool | None:
        decisions = [observer.samples(traceparent) for observer in self._observers]
        return None if None in decisions else any(decisions)

    def request_ended(self, request: WireRequest) -> None:
        for observer in self._observers:
            observer.request_ended(request)


def observer_group(observers: Sequence[RequestObserver]) -> RequestObserver | None:
    """Return one observer for several; None for none."""
    if len(observers) > 1:
        return _ObserverGroup(observers)
    return observers[0] if observers else None


current_request: Final[ContextVar[CurrentRequest | None]] = ContextVar("current_request", default=None)
"""The request of the running task; None without a request, or without HTTP request observers."""


def current_wire_request() -> WireRequest | None:
    """Return the record of the running task's request, or None."""
    request = current_request.get()
    return None if request is None else request.record


def set_failure(reason: str = "", *, code: str = "", node: str = "", error_type: str = "") -> None:
    """Add the reason, error code, failed node or exception type to the running call's event."""
    event = current_event.get()
    if event is not None:
        event.error_type = error_type or event.error_type
        event.reason, event.code, event.node = reason or event.reason, code or event.code, node or event.node


def record_body(data: bytes | memoryview, limit: int) -> None:
    """Keep the first ``limit`` bytes of the request body for observers."""
    request = current_wire_request()
    if request is not None:
        request.body, request.received = bytes(data[:limit]), len(data)
