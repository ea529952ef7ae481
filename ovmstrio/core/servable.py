"""The port between what is served and how it is reached.

A front end knows nothing of models and a servable nothing of wires; between them stand these protocols and the
values of ``ovmstrio.core.request``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    import trio
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    from ovmstrio.core.http import HttpAnswer, HttpRequest
    from ovmstrio.core.limits import ConcurrencyLimit
    from ovmstrio.core.request import InferRequest, InferResponse, ServableMetadata, StreamReply

__all__ = [
    "CountedService",
    "GrpcDeclaration",
    "GrpcServices",
    "HttpRoutes",
    "InferStream",
    "LeaseServable",
    "LeasedServable",
    "OrderedService",
    "SequenceInfo",
    "SequenceServable",
    "Servable",
    "Service",
    "StreamingServable",
]


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
    """A servable that stays open while it is held; of ``ovmstrio.registry.instances.Lease``'s shape."""

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
