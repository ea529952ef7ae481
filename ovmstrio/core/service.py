"""Service protocols: the interface between front ends and services.

Front ends know no models and servables know no transports; both use these protocols and ``ovmstrio.core.request``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from ovmstrio.core.hooks import NULL_NODE_HOOKS, NodeHooks
from ovmstrio.core.latency_histogram import HISTOGRAM_BOUNDS, empty_histogram

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    import trio
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
    from ovmstrio.core.limits import ConcurrencyLimit
    from ovmstrio.core.request import InferRequest, InferResponse, ServableMetadata, StreamReply
    from ovmstrio.util.drawing import Drawing


class Service(Protocol):
    """One version of a named service; the protocols below add the call types."""

    @property
    def metadata(self) -> ServableMetadata:
        """Inputs, outputs and platform; constant for the life of the service."""

    async def aclose(self) -> None:
        """Release all resources; called once, when no call is in flight."""


@runtime_checkable
class Servable(Service, Protocol):
    """A service that accepts tensors."""

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run one inference.

        The servable validates the request.  The buffers of the request must not change until the call returns.

        Raises:
            InvalidRequest: the request does not fit the inputs.
            ModelFailure: the runtime failed on a valid request.
            Overloaded: the queue is full.
        """


class HttpRoutes(Protocol):
    """A provider of HTTP routes below a mount point."""

    async def answer_http(self, request: HttpRequest) -> HttpAnswer | None:
        """Return the response, or None if there is no such path; the caller must close a streamed body.

        Raises:
            ServerError: the request failed; the message is that of the kind of service.
        """


@dataclass(frozen=True, slots=True)
class GrpcDeclaration:
    """gRPC services by full name and the proto file that declares them.

    ``files`` are the descriptors of that file and of all its imports, by file name.
    """

    names: tuple[str, ...]
    source: str
    files: Mapping[str, FileDescriptorProto]


class GrpcServices(Service, Protocol):
    """A service that may bring its own gRPC services, hosted by the server while the service is available."""

    @property
    def declaration(self) -> GrpcDeclaration | None:
        """The gRPC services, or None; constant for the life of the service."""


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """Summary of a live sequence.

    ``id`` is a number or a text that the client chose.  ``requests`` counts successful requests.  ``lost_seconds`` is
    above 0 for a sequence restored after a crash: up to that many seconds before the crash may be missing.
    """

    id: int | str
    age_seconds: float
    idle_seconds: float
    requests: int
    lost_seconds: float = 0.0


@runtime_checkable
class LimitedService(Protocol):
    """A service with its own concurrency limit, checked before request bodies are read."""

    @property
    def concurrency_limit(self) -> ConcurrencyLimit | None:
        """The limit, or None."""


@runtime_checkable
class OrderedService(Protocol):
    """A service whose requests of one connection must be delivered in the order in which they were sent."""

    @property
    def keeps_order(self) -> bool:
        """True if the order is kept."""


@runtime_checkable
class SequenceServable(Servable, Protocol):
    """A servable that keeps state for each of many sequences."""

    def sequences(self) -> list[SequenceInfo]:
        """Return the live sequences, ordered by id, texts after numbers."""


class LeasedServable(Protocol):
    """A servable that stays loaded while it is leased, such as ``ovmstrio.serving.instances.Lease``."""

    @property
    def servable(self) -> Servable:
        """The leased servable."""


class ServableLookup(Protocol):
    """Lookup by which graph and pipeline nodes call other services; implemented by ``Registry.lease``."""

    async def __call__(self, name: str, version: str = "", /) -> AbstractContextManager[LeasedServable]:
        """Lease a servable; raises and waits as ``Registry.lease``."""


class InferStream(Protocol):
    """An open inference stream.

    ``replies`` ends after the last reply or when the stream has failed; leaving the ``async with`` block then raises
    the error.  The caller sends and receives in two tasks.
    """

    replies: trio.MemoryReceiveChannel[StreamReply]

    async def send(self, request: InferRequest) -> None:
        """Send one request; an error of this request alone is added to ``replies`` as :class:`StreamProblem`.

        The stream owns the buffers of the request from now on.

        Raises:
            trio.BrokenResourceError: the stream has ended.

        Cancellation: while the stream is full; the request may have been accepted in part.
        """

    def end(self) -> None:
        """Half-close the stream: no request follows, and running work finishes."""


@runtime_checkable
class StreamingServable(Servable, Protocol):
    """A servable that supports streams."""

    def open_stream(self, first: InferRequest) -> AbstractAsyncContextManager[InferStream]:
        """Open a stream and send its first request before the block is entered.

        Leave the block only after ``replies`` has ended, or by an error or cancellation.  Both stop all work of the
        stream
        and wait, for a bounded time, until it has stopped.

        Raises:
            ServerError: on entering, the stream cannot be opened; on leaving, the stream failed.
        """


# Introspection


class NodeCounters:
    """Run counters of one node of a service; updated on the event loop only.

    Attributes:
        runs: finished runs, including failures.
        seconds: total time of the runs.
        times: histogram of run times with the bounds of :data:`ovmstrio.core.latency_histogram.HISTOGRAM_BOUNDS`.
    """

    __slots__ = ("_hooks", "active", "failures", "runs", "seconds", "times")

    def __init__(self, hooks: NodeHooks = NULL_NODE_HOOKS) -> None:
        self._hooks = hooks
        self.runs = 0
        self.failures = 0
        self.active = 0
        self.seconds = 0.0
        self.times = empty_histogram()

    def begin(self) -> float:
        """Count a started run and return its start time."""
        self.active += 1
        return perf_counter()

    def succeeded(self, begun: float) -> None:
        """Count a successful run."""
        self._hooks.ran(self._end(begun))

    def failed(self, begun: float) -> None:
        """Count a failed run."""
        self._end(begun)
        self.failures += 1
        self._hooks.failed()

    def _end(self, begun: float) -> float:
        seconds = perf_counter() - begun
        self.active -= 1
        self.runs += 1
        self.seconds += seconds
        self.times[bisect_left(HISTOGRAM_BOUNDS, seconds)] += 1
        return seconds

    def left(self) -> None:
        """Forget a cancelled run."""
        self.active -= 1


class StreamCounter:
    """Number of packets that went through one stream."""

    __slots__ = ("passed",)

    def __init__(self) -> None:
        self.passed = 0


@dataclass(frozen=True, slots=True)
class Introspection:
    """Introspection snapshot of a loaded service.

    Attributes:
        drawing: the node graph, or None.
        facts: JSON values by name.
        nodes: counters by node key of the drawing.
        streams: packet counters by edge number of the drawing; a missing edge carried one packet per run of its source.
        waiting: queue lengths by node key of the drawing.
    """

    drawing: Drawing | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    nodes: Mapping[str, NodeCounters] = field(default_factory=dict)
    streams: Mapping[int, StreamCounter] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)


NO_INTROSPECTION: Final = Introspection()


OPTION: Final = "option"
"""Source of a setting that its option decides."""


@dataclass(frozen=True, slots=True)
class Detection:
    """Setting of a service that loading detected: its value, and the file from which it comes."""

    setting: str
    value: str | int | float | bool | None
    source: str


# Raw HTTP payloads


# Layer times


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Time of one layer as the device runs it; several layers of the model file may be fused into one.

    ``runs_as`` is the device's name of the implementation, ``seconds`` the mean time per inference.
    """

    name: str
    type: str
    runs_as: str
    seconds: float


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Mean time of ``runs`` inferences, and the layers in execution order."""

    runs: int
    seconds: float
    layers: tuple[LayerTime, ...]


@runtime_checkable
class LayeredServable(Protocol):
    """A servable whose layers can be timed."""

    async def layer_times(self, seconds: float) -> LayerTimes:
        """Measure layer times on inputs of ones (dynamic dimensions set to 1) for about ``seconds``.

        A copy of the model is compiled with profiling for the measurement.

        Raises:
            ModelFailure: the model fails on these inputs, or the device reports no times.

        Cancellation: the copy may run on in its thread for at most ``seconds``.
        """


# Readiness signal

_readiness_callback: Final[ContextVar[Callable[[], None] | None]] = ContextVar("readiness_callback", default=None)


def notify_readiness_changed() -> None:
    """Signal that the readiness of a service may have changed; cheap, on the event loop only."""
    reconsider = _readiness_callback.get()
    if reconsider is not None:
        reconsider()


@contextmanager
def on_readiness_changed(reconsider: Callable[[], None]) -> Iterator[None]:
    """Register the readiness callback for tasks started within the block; it must neither block nor raise."""
    token = _readiness_callback.set(reconsider)
    try:
        yield
    finally:
        _readiness_callback.reset(token)


# Stack samples


@dataclass(frozen=True, slots=True)
class StackFrame:
    """A function and its first line."""

    name: str
    file: str
    line: int


@dataclass(slots=True)
class SampledThreads:
    """Stack samples of threads with the same purpose.

    Attributes:
        name: purpose of the threads.
        waiting: samples in which the thread was idle.
        cpu_seconds: CPU time, or None if the system does not report it.
        stacks: counts of the stacks of busy threads, outermost frame first.
        process: pid of the worker process; 0 for the server process.
        service: the service of the worker process.
    """

    name: str
    samples: int = 0
    waiting: int = 0
    cpu_seconds: float | None = None
    stacks: Counter[tuple[StackFrame, ...]] = field(default_factory=Counter)
    process: int = 0
    service: str = ""
