"""The one place where calls are observed, whatever they ask for and whichever door they came through.

The data plane makes an event of every call to a service that exists, and tells each observer when it starts, what
moves in it, and how it ended.  Metrics and the request log are observers; they get nothing but events.  Transports
make a :class:`WireRequest` of each request, whether it becomes a call or not, where somebody is told of those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter
from typing import Final, Literal, Protocol

from ovmstrio.core.connection import ClientAddress, Peer
from ovmstrio.core.errors import ServerError
from ovmstrio.core.tracing import Span

__all__ = [
    "CANCELLED",
    "OK",
    "QUESTIONS",
    "CallEvent",
    "CallObserver",
    "Door",
    "Interface",
    "RequestInHand",
    "RequestObserver",
    "Step",
    "WireProtocol",
    "WireRequest",
    "all_of",
    "current_event",
    "current_request",
    "current_wire_request",
    "is_over_tls",
    "keep_body",
    "kept_body_bytes",
    "note_failure",
    "say_nothing_else",
]

Interface = Literal["gRPC", "REST"]
WireProtocol = Literal["gRPC", "HTTP"]

OK: Final = "OK"
CANCELLED: Final = "Cancelled"

QUESTIONS: Final = frozenset({"ModelMetadata", "ModelReady", "GetModelMetadata", "GetModelStatus"})
"""Methods that ask about a service; all others have it do something."""


def say_nothing_else(error: ServerError, _method: str) -> ServerError:
    """Leave an error in the words that the server has for it."""
    return error


@dataclass(frozen=True, slots=True, eq=False)
class Door:
    """A way in: whose API is spoken, and over what.

    ``infer``, ``stream``, ``metadata``, ``ready`` and ``status`` are what the API calls these methods.  ``words`` puts
    the refusal of a look-up into the words that its clients know; it gets the error and the method.  Each is equal to
    itself alone: every call is counted by its door.
    """

    api: str
    interface: Interface
    infer: str = ""
    stream: str = ""
    metadata: str = ""
    ready: str = ""
    status: str = ""
    words: Callable[[ServerError, str], ServerError] = say_nothing_else


class WireRequest:
    """One request.

    Attributes:
        protocol: over which it came.
        method: of HTTP, in capitals.
        target: what was asked for, as it was sent; a path of gRPC.
        headers: names in small letters and values.
        peer: the other end of the connection.
        caller: who asks; empty where nobody had to be known, or as long as it is the running task's.
        started: on the clock of ``time.perf_counter``.
        status: of gRPC or HTTP, by its number; -1 before the end, and for who left before it was answered.
        is_stream: whether it may hold any number of messages, each a call.
        is_encrypted: whether it came over TLS.
        body: the begin of its body, or of its last message, as long as :data:`kept_body_bytes` says.
        received: bytes of its body, or messages.
        sent: bytes of its answer's.
        event: the last call that it became; None where it asked for nothing that is served, and once its end was told,
            for a call knows its request.
        traceparent: what its header says that is so called; None where the headers have to be asked.
        is_sampled: whether the call that it becomes is recorded if it has no parent; None where that is not decided.
    """

    __slots__ = (
        "body",
        "caller",
        "event",
        "headers",
        "is_encrypted",
        "is_sampled",
        "is_stream",
        "method",
        "peer",
        "protocol",
        "received",
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
        self.caller = ""
        self.started = perf_counter()
        self.status = -1
        self.is_stream = self.is_encrypted = False
        self.received = self.sent = 0
        self.event: CallEvent | None = None
        self.traceparent: str | None = None
        self.is_sampled: bool | None = None

    @property
    def client(self) -> ClientAddress:
        """The address of the client, derived from the peer and the headers of proxies."""
        return self.peer.client(self.headers)

    @property
    def told(self) -> WireRequest:
        """As :class:`RequestInHand`."""
        return self

    def header(self, name: str) -> str:
        """Find the first header of a name in small letters; empty if there is none."""
        for key, value in self.headers:
            if key == name:
                return value
        return ""


class Step(Enum):
    """What moves in a call that has begun."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    ANSWERED = "answered"


@dataclass(slots=True, eq=False)
class CallEvent:
    """One call of a service that exists.

    Attributes:
        name: of the service.
        version: the number that serves the call; empty for questions that are about no version.
        kind: of the service.
        door: how the call came.
        method: as the door's API calls it.
        request_id: that the caller gave, or was given.
        caller: whose call it is; empty where nobody had to be known.
        trace_id: of the sampled trace that the call is part of; empty for none.
        received: bytes of the call's body, or messages.
        sent: bytes of its answer's.
        queue_seconds: how long it waited, as far as the service knows.
        compute_seconds: how long the service worked on it.
        is_read: whether its body could be read.
        started: on the clock of ``time.perf_counter``.
        seconds: how long it took; 0 before its end.
        code: :data:`OK`, :data:`CANCELLED`, or the name of the error's class; empty before its end.
        error: what it ended with.
        reason: what is known of a failure that became an answer.
        node: the part of the service that failed; empty where that is not known, or the error knows it.
        request: as it came over a wire; None where nobody is told of requests.
        span: of the whole call; None where it is not traced.
    """

    name: str
    version: str
    kind: str
    door: Door
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
    caller: str = ""
    trace_id: str = ""
    request: WireRequest | None = None
    span: Span | None = None


current_event: Final[ContextVar[CallEvent | None]] = ContextVar("current_event", default=None)
"""The call that runs now, for what is logged meanwhile."""


class CallObserver(Protocol):
    """Someone who is told of every call; its methods must neither block nor raise.

    Who derives from it is told of nothing but what it has methods of its own for.
    """

    def call_started(self, event: CallEvent) -> None:
        """A call has found its service."""
        del event

    def call_moved(self, event: CallEvent, step: Step) -> None:
        """A request of a stream was taken in or refused, or a reply given."""
        del event, step

    def call_finished(self, event: CallEvent) -> None:
        """A call has ended, as its ``code``, ``error`` and ``seconds`` say."""
        del event

    def call_failed(self, event: CallEvent) -> None:
        """A call has ended with another code than :data:`OK`, of which everybody has been told as of any other."""
        del event


class RequestInHand(Protocol):
    """What a task answers.

    Attributes:
        event: the last call that it became; None before, and where it asked for nothing that is served.
    """

    event: CallEvent | None

    @property
    def told(self) -> WireRequest | None:
        """The request as observers are told of it; None where none of them has to know of it before its end."""
        ...


class RequestObserver(Protocol):
    """Someone who is told of requests; must neither block nor raise."""

    @property
    def needs_every(self) -> bool:
        """Whether it is to be told of each request, rather than of those that it samples and those that fail."""
        ...

    def samples(self, traceparent: str) -> bool | None:
        """Decide, as a request begins, whether it is sampled; None where that depends on what its headers say."""
        ...

    def request_ended(self, request: WireRequest) -> None:
        """A request was answered, or its client has left; it has its status."""
        ...


class _Several:
    """Tells several of requests, one after the other."""

    def __init__(self, observers: Sequence[RequestObserver]) -> None:
        self._observers = tuple(observers)
        self.needs_every = any(each.needs_every for each in observers)

    def samples(self, traceparent: str) -> bool | None:
        """Decide as the one does that samples."""
        decisions = [observer.samples(traceparent) for observer in self._observers]
        return None if None in decisions else any(decisions)

    def request_ended(self, request: WireRequest) -> None:
        """Tell of the end of a request."""
        for observer in self._observers:
            observer.request_ended(request)


def all_of(observers: Sequence[RequestObserver]) -> RequestObserver | None:
    """Make one observer of several; None of none."""
    if len(observers) > 1:
        return _Several(observers)
    return observers[0] if observers else None


kept_body_bytes: Final[ContextVar[int]] = ContextVar("kept_body_bytes", default=0)
"""How much of what is sent is kept for who is told of requests; 0 where nobody has asked for that."""

is_over_tls: Final[ContextVar[bool]] = ContextVar("is_over_tls", default=False)
"""Whether the connection that the running task serves is encrypted."""

current_request: Final[ContextVar[RequestInHand | None]] = ContextVar("current_request", default=None)
"""What the running task answers; None for what came over no wire, and over HTTP where nobody is told of requests."""


def current_wire_request() -> WireRequest | None:
    """Give the request that the running task answers; None where nobody has to know of it."""
    request = current_request.get()
    return None if request is None else request.told


def note_failure(reason: str = "", *, code: str = "", node: str = "") -> None:
    """Note in the event of the running call why it fails, by which name, or which part of its service does."""
    event = current_event.get()
    if event is not None:
        event.reason, event.code, event.node = reason or event.reason, code or event.code, node or event.node


def keep_body(data: bytes | memoryview, most: int) -> None:
    """Keep the begin of what the running task's request has sent, for who is told of it."""
    request = current_wire_request()
    if request is not None:
        request.body, request.received = bytes(data[:most]), len(data)
