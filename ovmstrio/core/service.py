"""The port between what is served and how it is reached.

A front end knows nothing of models and a servable nothing of wires; between them stand these protocols and the
values of ``ovmstrio.core.request``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, runtime_checkable

from ovmstrio.core.hooks import NULL_NODE_HOOKS, NodeHooks
from ovmstrio.core.latency_histogram import TIME_BOUNDS, no_times

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    import trio
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    from ovmstrio.core.generation import TextGenerator
    from ovmstrio.core.http import HttpAnswer, HttpRequest
    from ovmstrio.core.limits import ConcurrencyLimit
    from ovmstrio.core.request import InferRequest, InferResponse, ServableMetadata, StreamReply
    from ovmstrio.util.drawing import Drawing

__all__ = [
    "NOTHING_INSIDE",
    "CountedService",
    "Documents",
    "GrpcDeclaration",
    "GrpcServices",
    "HttpRoutes",
    "InferStream",
    "Inside",
    "LayerTime",
    "LayerTimes",
    "LayeredServable",
    "LeaseServable",
    "LeasedServable",
    "NodeTally",
    "OrderedService",
    "PayloadDocument",
    "PayloadService",
    "SampledThreads",
    "SequenceInfo",
    "SequenceServable",
    "Servable",
    "Service",
    "StackFrame",
    "StreamTally",
    "StreamingServable",
    "TextApi",
    "readiness_may_have_changed",
    "readiness_reconsidered",
]

# ----------------------------------------------------------------------
# The port between what is served and how it is reached
# ----------------------------------------------------------------------


class Service(Protocol):
    """One version of something that has a name and a life; what it takes is said by the protocols below."""

    @property
    def metadata(self) -> ServableMetadata:
        """Inputs, outputs and platform; constant for the life of the service."""
        ...

    async def aclose(self) -> None:
        """Give back everything that the service holds.  Called once, when no call is in flight."""
        ...


@runtime_checkable
class Servable(Service, Protocol):
    """A service that takes tensors."""

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer one call.

        The servable validates the request against its own inputs.  The caller owns the request, whose buffers must
        stay unchanged until this returns.

        Raises:
            InvalidRequest: the request does not fit the inputs.
            ModelFailure: the runtime failed on a valid request.
            Overloaded: its queue is full.

        Cancellation: at any checkpoint; work on the device is cancelled or its result dropped, and every pooled
        resource is given back.
        """
        ...


class HttpRoutes(Protocol):
    """A service that has HTTP paths of its own, or what gives them to it; they are below where it is mounted."""

    async def answer_http(self, request: HttpRequest) -> HttpAnswer | None:
        """Answer one request; None if there is no such path.

        Raises:
            ServerError: it is refused, in the words of the kind of service.

        Ownership: a stream in the answer is the caller's to close.
        Cancellation: at any checkpoint; what the request held is given back.
        """
        ...


@dataclass(frozen=True, slots=True)
class GrpcDeclaration:
    """gRPC services by their full names, the file that declares them, and what describes them.

    ``files`` are the descriptors of that file and of all that it imports, by name.
    """

    names: tuple[str, ...]
    source: str
    files: Mapping[str, FileDescriptorProto]


class GrpcServices(Service, Protocol):
    """A service that may bring gRPC services of its own, which the server hosts as long as it is available."""

    @property
    def declaration(self) -> GrpcDeclaration | None:
        """The services, None if there are none; constant for the life of the service."""
        ...


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """What a live sequence of requests looks like from outside.

    ``id`` is a number, or a text that its client chose.  ``requests`` counts those that succeeded.  ``lost_seconds`` is
    above 0 for a sequence that was restored after a server had ended without a word: what succeeded in at most so many
    seconds before that end is not in it.
    """

    id: int | str
    age_seconds: float
    idle_seconds: float
    requests: int
    lost_seconds: float = 0.0


@runtime_checkable
class CountedService(Protocol):
    """A service whose calls are counted from before their bodies are read, and refused beyond a number of its own."""

    @property
    def concurrency_limit(self) -> ConcurrencyLimit | None:
        """What counts them; None if nothing does."""
        ...


@runtime_checkable
class OrderedService(Protocol):
    """A service whose users see in which order requests come; those of one connection come as they were sent."""

    @property
    def keeps_order(self) -> bool:
        """Whether that is so."""
        ...


@runtime_checkable
class SequenceServable(Servable, Protocol):
    """A servable that keeps a state for each of many sequences of requests."""

    def sequences(self) -> list[SequenceInfo]:
        """List the live sequences, by id, texts behind numbers."""
        ...


class LeasedServable(Protocol):
    """A servable that stays open while it is held; of ``ovmstrio.serving.instances.Lease``'s shape."""

    @property
    def servable(self) -> Servable:
        """What may be called."""
        ...


class LeaseServable(Protocol):
    """How the nodes of graphs and pipelines call what else is served, by name; the registry's ``lease``."""

    async def __call__(self, name: str, version: str = "", /) -> AbstractContextManager[LeasedServable]:
        """Lease a servable; raises and waits as ``Registry.lease``."""
        ...


class InferStream(Protocol):
    """An open stream: requests go in, replies come out at their own pace.

    ``replies`` ends after the last reply, or when the stream has failed; then leaving the ``async with`` block that
    opened the stream raises why.  Whoever has the stream receives and sends in two tasks.
    """

    replies: trio.MemoryReceiveChannel[StreamReply]

    async def send(self, request: InferRequest) -> None:
        """Take in one more request; what is wrong with it alone becomes a :class:`StreamProblem` among the replies.

        It is among them before this returns.

        The request's buffers belong to the stream from now on.

        Raises:
            trio.BrokenResourceError: the stream has ended by itself.

        Cancellation: while the stream has no room; the request may have been taken in part.
        """
        ...

    def end(self) -> None:
        """Say that no request will follow; what is under way goes on to its end."""
        ...


@runtime_checkable
class StreamingServable(Servable, Protocol):
    """A servable that can be streamed to."""

    def open_stream(self, first: InferRequest) -> AbstractAsyncContextManager[InferStream]:
        """Open a stream with its first request, which is taken in before the block is entered.

        The block must not be left before ``replies`` has ended, unless by an error or cancellation, which stops
        everything that runs for the stream and waits, with a bound, until it has stopped.

        Raises:
            ServerError: on entering, when the stream cannot be opened; on leaving, when it failed.
        """
        ...


# ----------------------------------------------------------------------
# What services show of themselves to those who look at a server: how they are wired, and what their parts count
# ----------------------------------------------------------------------


class NodeTally:
    """What one node of a service has done, in all calls together; counted by the event loop alone.

    Args:
        hooks: are told of the runs.

    Attributes:
        runs: that have ended, however they did.
        failures: how many of these failed.
        active: runs under way.
        seconds: that the runs took in all.
        times: how many of them took how long, in the bands of :data:`ovmstrio.core.latency_histogram.TIME_BOUNDS`.
    """

    __slots__ = ("_hooks", "active", "failures", "runs", "seconds", "times")

    def __init__(self, hooks: NodeHooks = NULL_NODE_HOOKS) -> None:
        self._hooks = hooks
        self.runs = 0
        self.failures = 0
        self.active = 0
        self.seconds = 0.0
        self.times = no_times()

    def begin(self) -> float:
        """Count a run in, and give the time of its begin, which is told at its end."""
        self.active += 1
        return perf_counter()

    def succeeded(self, begun: float) -> None:
        """Count the end of a run."""
        self._hooks.ran(self._end(begun))

    def failed(self, begun: float) -> None:
        """Count a run that failed."""
        self._end(begun)
        self.failures += 1
        self._hooks.failed()

    def _end(self, begun: float) -> float:
        """Count out a run that has ended, and give the seconds that it took."""
        seconds = perf_counter() - begun
        self.active -= 1
        self.runs += 1
        self.seconds += seconds
        self.times[bisect_left(TIME_BOUNDS, seconds)] += 1
        return seconds

    def left(self) -> None:
        """Count out a run that was cancelled, which is none."""
        self.active -= 1


class StreamTally:
    """How often something went along one connection."""

    __slots__ = ("passed",)

    def __init__(self) -> None:
        self.passed = 0


@dataclass(frozen=True, slots=True)
class Inside:
    """What one loaded service has inside at one moment.

    Attributes:
        drawing: how its nodes are joined; None for what has none.
        facts: by name, numbers, texts, or lists and objects of them.
        nodes: what the nodes count, by the keys of their boxes.
        streams: how much went along the edges, by their numbers in the drawing; one that is not there had what the
            runs of its source gave.
        waiting: how much waits at the entrance of nodes, by the keys of their boxes.
    """

    drawing: Drawing | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    nodes: Mapping[str, NodeTally] = field(default_factory=dict)
    streams: Mapping[int, StreamTally] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)


NOTHING_INSIDE: Final = Inside()


# ----------------------------------------------------------------------
# The ports of services that take requests over HTTP whole, with documents for answers, and of who reads them
# ----------------------------------------------------------------------


class PayloadDocument(NamedTuple):
    """A document, or a piece of one, and the type of its content."""

    data: bytes
    media_type: str


class Documents(Protocol):
    """What a service answers, as it comes."""

    async def receive(self) -> PayloadDocument | None:
        """Give the next document; None behind the last one.

        Raises:
            ServerError: the service failed.

        Cancellation: while there is none; nothing is lost.
        """
        ...


class PayloadService(Service, Protocol):
    """A service that may take such requests."""

    @property
    def takes_payloads(self) -> bool:
        """Whether it does; constant for its life."""
        ...

    def open_payload(self, request: HttpRequest, deadline: float) -> AbstractAsyncContextManager[Documents]:
        """Begin to answer a request, whose body has no encoding any more, until a deadline on trio's clock.

        Leaving the block before the end stops what makes the documents.

        Raises:
            NotSupported: on entering, it takes none.
            ServerError: on entering, the request cannot be answered.

        Cancellation: anywhere; what makes the documents is stopped before this returns.
        """
        ...


class TextApi(Protocol):
    """Reads what requests over HTTP ask of models that make text, and writes what these answer."""

    async def answer(
        self,
        model: TextGenerator,
        name: str,
        request: HttpRequest,
        send: Callable[[PayloadDocument], Awaitable[None]],
    ) -> None:
        """Have a model answer: with one document, or with one for each event where the body asks for a stream.

        Args:
            model: makes the text.
            name: what the answer calls it where the body does not name it.
            request: has the path, and a body of JSON without encoding.
            send: is called with each document.

        Raises:
            InvalidRequest: the path is no one of those that ask for text, or the body cannot be read.
            ServerError: as ``TextGenerator.generate``, and as ``send``.

        Cancellation: anywhere; the model stops within a step of its engine.
        """
        ...


# ----------------------------------------------------------------------
# How long the layers of a model take: values, and the port of whoever can tell
# ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One layer as the device runs it; several of the file's may be one.

    ``runs_as`` is what the device calls the way in which it runs, ``seconds`` the time of one inference, on average.
    """

    name: str
    type: str
    runs_as: str
    seconds: float


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """What so many inferences took each, on average, and their layers in the order in which they run."""

    runs: int
    seconds: float
    layers: tuple[LayerTime, ...]


@runtime_checkable
class LayeredServable(Protocol):
    """A servable whose layers can be timed."""

    async def layer_times(self, seconds: float) -> LayerTimes:
        """Time the layers on inputs of ones whose open dimensions are 1, for about so long.

        Raises:
            ModelFailure: the model does not run on these, or its device tells no times.

        Ownership: a copy of the model, compiled with times, which is gone when this returns.
        Cancellation: at once; the copy runs on in its thread for no longer than ``seconds``.
        """
        ...


# ----------------------------------------------------------------------
# Where a service finds that it can no longer answer, or can again, told to whoever says whether the server is ready
# ----------------------------------------------------------------------

_reconsider: Final[ContextVar[Callable[[], None] | None]] = ContextVar(
    "who says whether the server is ready", default=None
)


def readiness_may_have_changed() -> None:
    """Say that something that keeps a service from answering has come or gone; on the event loop, and cheap."""
    reconsider = _reconsider.get()
    if reconsider is not None:
        reconsider()


@contextmanager
def readiness_reconsidered(reconsider: Callable[[], None]) -> Iterator[None]:
    """Have a function called for that, in all tasks started within the block; it must neither block nor raise."""
    token = _reconsider.set(reconsider)
    try:
        yield
    finally:
        _reconsider.reset(token)


# ----------------------------------------------------------------------
# What was seen of the stacks of threads, as values
# ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StackFrame:
    """A function and where it begins."""

    name: str
    file: str
    line: int


@dataclass(slots=True)
class SampledThreads:
    """What was seen of threads that do the same.

    Attributes:
        name: what they do.
        samples: how often one was seen.
        waiting: how often one waited for something to do.
        cpu_seconds: how long they had a processor; None where the system does not tell.
        stacks: how often each stack was seen in which it did not wait, outermost frame first.
        process: the number of the worker process that they are of; 0 for the server itself.
        service: for which that process works.
    """

    name: str
    samples: int = 0
    waiting: int = 0
    cpu_seconds: float | None = None
    stacks: Counter[tuple[StackFrame, ...]] = field(default_factory=Counter)
    process: int = 0
    service: str = ""
