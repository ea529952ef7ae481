"""The one place where calls are observed, whatever they ask for and whichever door they came through.

The data plane makes an event of every call to a service that exists, and tells each observer when it starts, what
moves in it, and how it ended.  Metrics and the request log are observers; they get nothing but events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter
from typing import Final, Literal, Protocol

from ovmstrio.core.errors import ServerError

__all__ = ["CANCELLED", "OK", "QUESTIONS", "CallEvent", "CallObserver", "Door", "Interface", "Step", "say_nothing_else"]

Interface = Literal["gRPC", "REST"]

OK: Final = "OK"
CANCELLED: Final = "Cancelled"

QUESTIONS: Final = frozenset({"ModelMetadata", "ModelReady", "GetModelMetadata", "GetModelStatus"})
"""Methods that ask about a service; all others have it do something."""


def say_nothing_else(error: ServerError, _method: str) -> ServerError:
    """Leave an error in the words that the server has for it."""
    return error


@dataclass(frozen=True, slots=True)
class Door:
    """A way in: whose API is spoken, and over what.

    ``infer``, ``stream``, ``metadata``, ``ready`` and ``status`` are what the API calls these methods.  ``words`` puts
    the refusal of a look-up into the words that its clients know; it gets the error and the method.
    """

    api: str
    interface: Interface
    infer: str = ""
    stream: str = ""
    metadata: str = ""
    ready: str = ""
    status: str = ""
    words: Callable[[ServerError, str], ServerError] = say_nothing_else


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
    caller: str = ""
    trace_id: str = ""


class CallObserver(Protocol):
    """Someone who is told of every call; its methods must neither block nor raise."""

    def call_started(self, event: CallEvent) -> None:
        """A call has found its service."""
        ...

    def call_moved(self, event: CallEvent, step: Step) -> None:
        """A request of a stream was taken in or refused, or a reply given."""
        ...

    def call_finished(self, event: CallEvent) -> None:
        """A call has ended, as its ``code``, ``error`` and ``seconds`` say."""
        ...
