"""What every front end calls: the same look-up, observation and errors for each protocol.

::

    front end ──> DataPlane.infer ───────> Registry.lease ──> Servable.infer
              ├─> DataPlane.open_stream ─> Registry.lease ──> StreamingServable.open_stream
              └─> DataPlane.call ────────> Registry.lease ──> whatever the service takes besides tensors
                      │ makes an event of each, and tells observers of it
"""

from __future__ import annotations

import math
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast, overload

import trio

from ovmstrio.core.errors import (
    InvalidRequest,
    NotFound,
    NotSupported,
    Overloaded,
    PayloadTooLarge,
    ServerError,
    ServiceMissing,
    TooManyRequests,
    VersionRetired,
)
from ovmstrio.core.events import OK, CallEvent, CallObserver, Step, current_event, current_request
from ovmstrio.core.limits import current_place
from ovmstrio.core.service import SequenceServable
from ovmstrio.core.tensor import Tensor
from ovmstrio.serving.admission import Admission, OwnLimits, count_call, give_place
from ovmstrio.serving.calls import ObservedCall, code_of
from ovmstrio.serving.kind import Takes
from ovmstrio.serving.open_stream import OpenStream
from ovmstrio.serving.records import Readiness
from ovmstrio.serving.registry import parse_version
from ovmstrio.serving.requested_outputs import StreamedOutputs, asks_plainly, check_outputs, keep_classes, keep_outputs
from ovmstrio.serving.response_budget import AnswerRoom
from ovmstrio.serving.shared_memory import ClientRegions, place_tensors, write_outputs
from ovmstrio.telemetry.call_statistics import CallStatistics
from ovmstrio.transport.send_budget import current_share

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from ovmstrio.core.events import Door, Interface
    from ovmstrio.core.limits import CallPlace
    from ovmstrio.core.request import Arrival, InferRequest, InferResponse
    from ovmstrio.core.service import SequenceInfo, StreamingServable
    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.core.worker_peers import Siblings
    from ovmstrio.serving.instances import Lease
    from ovmstrio.serving.model_control import ModelControl
    from ovmstrio.serving.records import VersionStatus
    from ovmstrio.serving.registry import Registry
    from ovmstrio.telemetry.call_statistics import VersionStatistics
    from ovmstrio.telemetry.metrics import Metrics
    from ovmstrio.telemetry.recent_traces import RecentTraces

__all__ = [
    "DEFAULT_NAME",
    "CallObservers",
    "DataPlane",
    "Description",
    "ModelMetadata",
    "Renderer",
    "compute_as_said",
    "no_streams",
    "otherwise",
]

# ----------------------------------------------------------------------
# Those who are told of every call, and what an event is when it starts and ends
# ----------------------------------------------------------------------


class CallObservers:
    """Tells of calls, one observer after the other.

    Args:
        observers: are told.

    Attributes:
        statistics: of all calls.
    """

    def __init__(self, observers: Sequence[CallObserver]) -> None:
        self._started: tuple[Callable[[CallEvent], None], ...] = _methods(observers, "call_started")
        self._moved: tuple[Callable[[CallEvent, Step], None], ...] = _methods(observers, "call_moved")
        self._finished: tuple[Callable[[CallEvent], None], ...] = _methods(observers, "call_finished")
        self._failed: tuple[Callable[[CallEvent], None], ...] = _methods(observers, "call_failed")
        self.statistics = CallStatistics()

    def start(self, event: CallEvent, lease: Lease | None = None) -> None:
        """Tell that a call has found its service; it is the running task's until it ends."""
        if lease is not None and lease.waited_seconds:
            event.queue_seconds = lease.waited_seconds
            event.started -= lease.waited_seconds
        current_event.set(event)
        request = current_request.get()
        if request is not None:
            event.request, request.event = request.told, event
        for tell in self._started:
            tell(event)

    def move(self, event: CallEvent, step: Step) -> None:
        """Tell what moves in a call."""
        for tell in self._moved:
            tell(event, step)

    def end(self, event: CallEvent, error: BaseException | None) -> None:
        """Tell that a call has ended, and with what."""
        event.seconds = perf_counter() - event.started
        event.code = event.code or (OK if error is None else code_of(error))
        event.error = event.error or error
        if not event.compute_seconds:
            event.compute_seconds = event.seconds - event.queue_seconds
        self.statistics.call_finished(event)
        for tell in self._finished:
            tell(event)
        if event.code != OK:
            for tell in self._failed:
                tell(event)
        current_event.set(None)


def _methods(observers: Sequence[CallObserver], name: str) -> tuple[Any, ...]:
    """Give the observers' methods of a name, but for those that do nothing."""
    nothing = getattr(CallObserver, name)
    return tuple(getattr(each, name) for each in observers if getattr(type(each), name, nothing) is not nothing)


# ----------------------------------------------------------------------
# Answers written as bytes: never those that are too large, and the large ones in a thread
# ----------------------------------------------------------------------

_T = TypeVar("_T")

_AT_ONCE: Final[dict[Interface, int]] = {"gRPC": 2 * 2**20, "REST": 256 * 1024}
"""Bytes of outputs that are written within a millisecond or two: as they are, or as the text of numbers."""
_THREADS: Final = 2


class Renderer:
    """Writes the answers of one server.

    Args:
        most_bytes: how large the outputs of an answer may be together.
    """

    def __init__(self, most_bytes: float = math.inf) -> None:
        self.most_bytes = most_bytes
        # More would only take the interpreter's lock from the event loop in turn.
        self._threads = trio.CapacityLimiter(_THREADS)

    def may_at_once(self, response: InferResponse, door: Door) -> bool:
        """Tell whether a response is small enough to be written on the event loop, without :meth:`render`.

        Raises:
            PayloadTooLarge: the outputs are too large.
        """
        only = response.outputs[0] if len(response.outputs) == 1 else None
        # Every answer is asked, and most have one output, of numbers.
        size = only.array.nbytes if type(only) is Tensor and not only.array.dtype.hasobject else response.nbytes
        if size > self.most_bytes:
            raise PayloadTooLarge.of_outputs(size, self.most_bytes)
        return size <= _AT_ONCE[door.interface] or (door.interface == "gRPC" and response.lies_as_sent)

    async def render(self, write: Callable[[InferResponse], _T], response: InferResponse, door: Door) -> _T:
        """Give what ``write`` makes of a response.

        Raises:
            PayloadTooLarge: the outputs are too large; nothing has been copied.
            Exception: as ``write``.

        Cancellation: not while it is written; one that waits to be written leaves at once.
        """
        if self.may_at_once(response, door):
            return write(response)
        return await trio.to_thread.run_sync(write, response, limiter=self._threads)


# ----------------------------------------------------------------------
# Calls of which more is said than which tensors they bring: inputs and outputs in shared memory, outputs, classes
# ----------------------------------------------------------------------


async def compute_as_said(request: InferRequest, lease: Lease, regions: ClientRegions) -> InferResponse:
    """Have the service answer, and do what is said of the tensors.

    Raises:
        InvalidRequest: outputs are asked for that it has not, or parts of regions that there are not; before anything
            is computed.
        ServerError: whatever the service raised.

    Cancellation: as the service's; nothing is written into a region then.
    """
    if request.outputs:
        check_outputs(request.outputs, lease.servable.metadata.outputs)
    places = place_tensors(request, regions)
    answer = await lease.servable.infer(request)
    if request.outputs:
        keep_outputs(answer, request.outputs)
        keep_classes(answer, request.outputs, lease.servable.metadata.labels)
        await write_outputs(answer, places)
    return answer


# ----------------------------------------------------------------------
# What the data plane tells of what is served: to those who ask about it, and to those who call it in the wrong way
# ----------------------------------------------------------------------

DEFAULT_NAME: Final = "OpenVINO Model Server"
"""What the server is called; clients of OVMS look at it."""


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What the server tells of one servable.

    ``versions`` are all that can be called, ascending; ``serving`` is the one that was asked about.  For
    ``joined_rows`` see ``ServableMetadata``.
    """

    name: str
    versions: list[str]
    serving: str
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    extra: dict[str, Any]
    joined_rows: int
    has_sequences: bool
    has_streams: bool


class Description(NamedTuple):
    """What a caller must know to call a servable with as little as names and values."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    has_streams: bool


def no_streams(name: str) -> ServiceMissing:
    """Refuse a stream to a name that nothing has that takes streams."""
    return ServiceMissing(f'nothing that can be streamed to is served under the name "{name[:80]}"')


def otherwise(lease: Lease, untaken: str) -> str:
    """Say what a service does not take, and how it is called."""
    ways = {
        Takes.TENSORS: "with single requests",
        Takes.HTTP: f"at /{lease.name}",
        Takes.GRPC: "by its own gRPC services",
        Takes.STREAMS: "by streams",
        Takes.PAYLOADS: "below /v3",
        Takes.GENERATION: "by OpenAI's API below /v3",
    }
    named = " or ".join(way for takes, way in ways.items() if takes in lease.takes)
    return f'the {lease.kind} "{lease.name}" takes no {untaken}; call it {named}'


# ----------------------------------------------------------------------
# What every front end calls: the same look-up, observation and errors for each protocol
# ----------------------------------------------------------------------

STARTING: Final = "the listeners are not bound yet"
DRAINING: Final = "the server is shutting down"


class DataPlane:
    """The operations of one server, free of any protocol.

    Args:
        registry: what is served.
        reload: brings the registry in line with the configuration and says whether anything changed; None where
            there is nothing to reload from.
        observers: are told of every call of a service that exists.
        metrics: rendered for scrapers; None when metrics are off.
        obstacle: tells why what is served cannot answer although it is loaded, or an empty text.
        most_answer_bytes: how large the outputs of an answer, or of a reply of a stream, may be together.
        admission: says how many calls there may be at once; by default as the services are configured.
        regions: those of shared memory that clients register; none may be unless given.
        server_name: what clients are told that it is called.
        traces: the last ones; None where none are kept.
        control: loads and unloads by name; None where that is not how things are loaded.

    Attributes:
        siblings: the other processes of the server, where it has several.
        workers_reason: why it has as many processes as it has, where it has chosen that itself.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        reload: Callable[[], Awaitable[bool]] | None = None,
        observers: Sequence[CallObserver] = (),
        metrics: Metrics | None = None,
        obstacle: Callable[[], str] | None = None,
        most_answer_bytes: float = math.inf,
        admission: Admission | None = None,
        regions: ClientRegions | None = None,
        control: ModelControl | None = None,
        server_name: str = DEFAULT_NAME,
        traces: RecentTraces | None = None,
    ) -> None:
        self.registry = registry
        self.server_name = server_name
        self.traces = traces
        self.control = control
        self.regions = regions or ClientRegions()
        self.siblings: Siblings | None = None
        self.workers_reason = ""
        self._renderer = Renderer(most_answer_bytes)
        self._admission = admission or Admission(limit_of=registry.limit_of)
        self._has_limit = self._admission.has_server_limit
        self._own_limits = OwnLimits(registry)
        self._obstacle = obstacle
        self._reload = reload
        calls = CallObservers((*observers, *(() if metrics is None else (metrics,))))
        self._start, self._move, self._end, self.call_statistics = calls.start, calls.move, calls.end, calls.statistics
        self._metrics = metrics
        self._metered: set[str] = set()
        self._room = AnswerRoom()
        self._not_serving = STARTING
        self._changed = trio.Event()
        registry.subscribe(lambda _: self.announce())
        registry.subscribe_readiness(lambda _: self.announce())

    # Life cycle

    def is_live(self) -> bool:
        """Tell that the process answers; true as soon as it can be asked."""
        return True

    def readiness(self) -> Readiness:
        """Tell whether requests will be served, and if not, why."""
        if self._not_serving:
            return Readiness(ready=False, reason=self._not_serving)
        reason = "" if self._obstacle is None else self._obstacle()
        return Readiness(ready=False, reason=reason) if reason else self.registry.readiness

    @property
    def is_draining(self) -> bool:
        """Whether the server has begun to end."""
        return self._not_serving == DRAINING

    def begin_serving(self) -> None:
        """Say that the listeners are bound."""
        self._not_serving = ""
        self.announce()

    def begin_drain(self) -> None:
        """Say that the server will end; it is not ready from now on."""
        self._not_serving = DRAINING
        self.announce()

    async def wait_change(self) -> None:
        """Return at the next change of the readiness of the server or of anything that it serves.

        Cancellation: at once; nothing is held.
        """
        await self._changed.wait()

    def announce(self) -> None:
        """Wake whoever waits for a change."""
        self._changed.set()
        self._changed = trio.Event()
        if self._metrics is not None:
            self._metrics.child("ovmstrio_ready").set(self.readiness().ready)

    # What is served

    def statuses(self) -> dict[str, list[VersionStatus]]:
        """Tell the state of every version ever seen, by servable."""
        return self.registry.statuses()

    def model_ready(self, name: str, version: str, door: Door) -> bool:
        """Tell whether a version, or the default one, can be called.

        Raises:
            NotFound: the name or version is unknown.
            InvalidRequest: the version is not a number.
        """
        with self._worded(door, door.ready):
            ready = self.registry.is_ready(name, version)
        self._note_question(door.ready, name, "", door)
        return ready

    def model_status(self, name: str, version: int, door: Door) -> list[VersionStatus]:
        """Tell the state of one version, or with 0 of all ever seen: TensorFlow Serving's ``GetModelStatus``.

        Raises:
            NotFound: the name or version is unknown.
        """
        with self._worded(door, door.status):
            statuses = self.registry.version_statuses(name, version)
        self._note_question(door.status, name, "", door)
        return statuses

    def model_metadata(self, name: str, version: str, door: Door) -> ModelMetadata:
        """Tell the inputs and outputs of a version, or the default one.

        Raises:
            NotFound: the name or version is unknown or retired.
            VersionLoading: it is not loaded yet.
            InvalidRequest: the version is not a number.
        """
        with self._worded(door, door.metadata):
            known = self.registry.peek(name, version).metadata
        versions = self.registry.available_versions(name)
        serving = str(asked if (asked := int(version or 0)) in versions else versions[-1])
        self._note_question(door.metadata, name, serving, door)
        return ModelMetadata(
            name,
            [str(v) for v in versions],
            serving,
            known.platform,
            known.inputs,
            known.outputs,
            dict(known.extra),
            known.joined_rows,
            known.has_sequences,
            Takes.STREAMS in self.registry.takes_of(name, version),
        )

    def statistics(self, name: str, version: str, door: Door) -> list[tuple[str, str, VersionStatistics]]:
        """Tell what was counted of the calls of a version, of all of a name, or of everything that can be called.

        Raises:
            NotFound: the name or version is unknown, or not served any more.
            VersionLoading: the version is not loaded yet.
            InvalidRequest: the version is not a number.
        """
        number = parse_version(version)
        if name:
            with self._worded(door, door.metadata):
                self.registry.peek(name, version)
        names = [name] if name else sorted(self.registry.statuses())
        every = ((each, str(known)) for each in names for known in self.registry.available_versions(each))
        return self.call_statistics.of(pair for pair in every if not number or pair[1] == str(number))

    def sequences(self, name: str, version: str, door: Door) -> list[SequenceInfo]:
        """List the live sequences of a version of a stateful model, or of the default one, by id.

        Raises:
            NotFound: the name or version is unknown or retired.
            VersionLoading: it is not loaded yet.
            InvalidRequest: the version is not a number.
            NotSupported: the model has no sequences.
        """
        with self._worded(door, door.metadata):
            servable = self.registry.peek(name, version)
        if not isinstance(servable, SequenceServable):
            raise NotSupported(f"{name!r} has no sequences: it is not a stateful model")
        return servable.sequences()

    # Calls

    def has_limits(self) -> bool:
        """Whether calls may have to wait, or be refused, for their number."""
        return self._has_limit or self.registry.has_limits or bool(self._own_limits.limited)

    async def admit(
        self, name: str, version: str, door: Door, method: str = "", arrival: Arrival | None = None
    ) -> CallPlace | None:
        """Take a place for a call before its body is looked at; None where there is no limit, or no such service.

        Whoever has it makes it the :data:`current_place` of the task that makes the call, and releases it in the end.
        A call that comes without one takes its place itself.

        Raises:
            Overloaded: the call would have to wait, and as many wait as may; it has been counted.
            TooManyRequests: the service itself allows no more; likewise.

        Cancellation: while it waits; it leaves the queue.
        """
        if not self.has_limits() or not self.registry.knows(name):
            return None
        if arrival is not None:
            arrival.call(name)
            await arrival.take_turn()
        if self._metrics is not None and name not in self._metered:
            self._metered.add(name)
            self._metrics.limited(name, lambda: self._admission.queued(name))
        place = None
        try:
            place = await self._admission.enter(name)
            self._own_limits.hold(name, place)
        except Overloaded as error:
            if place is not None:
                place.release()
            self._count_refused(name, version, error, door, method or door.infer)
            raise
        return place

    def _count_refused(self, name: str, version: str, error: Overloaded, door: Door, method: str) -> None:
        if self._metrics is not None:
            self._metrics.child("ovmstrio_refused_requests", name).inc()
        self.count_unparsed(name, version, error, door, method=method)

    @overload
    async def infer(self, request: InferRequest, door: Door) -> InferResponse: ...

    @overload
    async def infer(
        self, request: InferRequest, door: Door, render: Callable[[InferResponse], tuple[_T, int]]
    ) -> _T: ...

    async def infer(
        self, request: InferRequest, door: Door, render: Callable[[InferResponse], tuple[Any, int]] | None = None
    ) -> Any:
        """Answer one call, as ``render`` makes an answer and tells its size of what the service gives.

        Outputs that the request names are all that is answered, in that order.  It waits before it computes while
        answers for the same client, or for all, have no room.

        Raises:
            ServerError: any of its kinds; what the look-up or the servable raised.

        Ownership: the request's buffers must stay unchanged until this returns.
        Cancellation: at any checkpoint; the servable gives back what the call held.
        """
        method, arrival = door.infer, request.arrival
        now = None if self.has_limits() else self.registry.lease_now(request.model_name, request.model_version)
        lease = now or await self._lease_later(request, door)
        # A block of the lease's own would cost each call two more calls of functions.
        try:
            if Takes.TENSORS not in lease.takes:
                raise NotSupported(otherwise(lease, "tensors"))
            if arrival is not None:
                await self._take_turn(arrival, request.model_name, lease)
            share, room, key = current_share.get(), self._room, lease.name
            size = 0 if share is None else room.take(share, key) or await room.wait(share, key, lease.servable)
            event = CallEvent(lease.name, lease.version, lease.kind, door, method, request.id, request.received)
            request.event = event
            self._start(event, lease)
            try:
                if arrival is not None and lease.has_order:
                    await arrival.take_turn()
                    arrival.settle()
                is_plain = asks_plainly(request, lease.servable.metadata.outputs if request.outputs else ())
                computing = lease.servable.infer(request) if is_plain else compute_as_said(request, lease, self.regions)
                answer: Any = await computing
                if is_plain and request.outputs:
                    keep_outputs(answer, request.outputs)
                if render is not None:
                    renderer = self._renderer
                    at_once = renderer.may_at_once(answer, door)
                    answer, event.sent = render(answer) if at_once else await renderer.render(render, answer, door)
                    if event.sent != size:
                        self._room.learn(lease.name, event.sent)
            except BaseException as error:
                self._end(event, error)
                raise
            finally:
                if share is not None:
                    share.give_back(size)
            self._end(event, None)
            return answer
        finally:
            lease.release()

    async def _take_turn(self, arrival: Arrival, name: str, lease: Lease) -> None:
        """Wait for the turn of a request where order matters; no later one waits for this where it does not."""
        if lease.has_order:
            arrival.call(name)
            await arrival.take_turn()
        else:
            arrival.settle()

    async def _lease_later(self, request: InferRequest, door: Door) -> Lease:
        """Lease what a request calls where that may have to wait; no later request for others waits for this one."""
        if (arrival := request.arrival) is not None:
            arrival.call(request.model_name)
        asked = request.model_name, request.model_version, door, door.infer
        return await (self._admitted_lease(*asked, arrival) if self.has_limits() else self._lease(*asked))

    async def call(
        self,
        name: str,
        door: Door,
        method: str,
        *,
        request_id: str = "",
        received: int = 0,
        is_stream: bool = False,
        is_free: bool = False,
    ) -> ObservedCall:
        """Lease a service for a call that takes no tensors; the call ends with the ``with`` block of what is given.

        It waits while answers for the same client, or for all, have no room; ``is_stream`` tells that there will be
        many, each of which is waited for by itself, and ``is_free`` that it is none of those that are limited.

        Raises:
            NotFound: the name is unknown, or not served any more.
            VersionLoading: it was not loaded in time.
            Overloaded: as many calls are under way, or wait, as may.

        Ownership: the lease, and the event's end, until the block is left, or whoever it was handed over to is done.
        Cancellation: while it is waited for; nothing is held.
        """
        take = self._admitted_lease if self.has_limits() and not is_free else self._lease
        lease = await take(name, "", door, method)
        try:
            if not is_free:
                count_call(lease)
            room = await self._room.enter(f"{name}/{method}", is_stream=is_stream)
        except BaseException as error:
            lease.release()
            if isinstance(error, TooManyRequests):
                self._count_refused(name, lease.version, error, door, method)
            raise
        event = CallEvent(name, lease.version, lease.kind, door, method, request_id, received)
        self._start(event, lease)
        return ObservedCall(lease, event, self._end, room)

    async def describe(self, name: str, version: str, door: Door) -> Description:
        """Tell what a version, or the default one, is called with; one that is being loaded is waited for.

        Unlike :meth:`model_metadata` this is a part of another call and not observed.

        Raises:
            NotFound: the name or version is unknown or retired.
            VersionLoading: it was not loaded in time.
            InvalidRequest: the version is not a number.

        Cancellation: while it is waited for; nothing is held.
        """
        with await self._lease(name, version, door, door.infer) as lease:
            servable = lease.servable
            known = servable.metadata
            return Description(known.inputs, known.outputs, Takes.STREAMS in lease.takes)

    async def takes_streams(self, name: str) -> bool:
        """Tell whether a stream to a name is to be opened, rather than called for each of its messages.

        So it is for what does not exist or is called in neither way: :meth:`open_stream` says why it cannot be.

        Cancellation: while it is loaded; nothing is held.
        """
        try:
            with await self.registry.lease(name) as lease:
                return Takes.STREAMS in lease.takes or Takes.TENSORS not in lease.takes
        except ServerError:
            return True

    @asynccontextmanager
    async def open_stream(self, first: InferRequest, door: Door) -> AsyncIterator[OpenStream]:
        """Open a stream with its first request, whose version does not matter: what can be streamed to has only one.

        The block must not be left before the replies have ended, unless by an error or cancellation.

        Raises:
            NotFound: on entering, when nothing of that name can be streamed to.
            ServerError: on entering, what the look-up raised, or why the stream could not begin; on leaving, why it
                failed.

        Ownership: everything that runs for the stream, and the lease, until the block is left.
        Cancellation: at any checkpoint; everything that runs for the stream is stopped before this returns.
        """
        with await self._lease_stream(first.model_name, door) as lease:
            if Takes.STREAMS not in lease.takes:
                missing = door.words(no_streams(first.model_name), door.stream)
                raise ServiceMissing(f"{missing}: {otherwise(lease, 'streams')}")
            servable = cast("StreamingServable", lease.servable)
            await self._room.enter(lease.name, is_stream=True)
            event = CallEvent(lease.name, lease.version, lease.kind, door, door.stream, first.id, first.received)
            self._start(event, lease)
            opened = None
            try:
                self._view_streamed(first)
                outputs = StreamedOutputs(first, servable.metadata)
                async with servable.open_stream(first) as stream:
                    opened = OpenStream(
                        stream,
                        event,
                        self._move,
                        most_bytes=self._renderer.most_bytes,
                        outputs=outputs,
                        prepare=self._view_streamed,
                    )
                    yield opened
            except BaseException as error:
                if opened is None:
                    self._move(event, Step.REJECTED)
                self._end(event, error)
                raise
            finally:
                if opened is not None:
                    opened.settle()
            self._end(event, None)

    def _view_streamed(self, request: InferRequest) -> None:
        """Give a request of a stream its inputs that lie in regions; replies to no one request have no place there."""
        if place_tensors(request, self.regions):
            raise InvalidRequest("outputs in shared memory: the replies of a stream belong to none of its requests")

    async def _lease_stream(self, name: str, door: Door) -> Lease:
        place = await self._place(name, "", door, door.stream)
        try:
            lease = await self.registry.lease(name)
            give_place(lease, place)
            place = None
        except VersionRetired as error:
            raise door.words(error, door.stream) from None
        except NotFound:
            raise door.words(no_streams(name), door.stream) from None
        finally:
            if place is not None:
                place.release()
        return lease

    async def _admitted_lease(
        self, name: str, version: str, door: Door, method: str, arrival: Arrival | None = None
    ) -> Lease:
        """Lease a service for a call where there are limits; one that has no place takes it."""
        place = await self._place(name, version, door, method, arrival)
        try:
            lease = await self._lease(name, version, door, method)
            give_place(lease, place)
            place = None
        finally:
            if place is not None:
                place.release()
        return lease

    async def _place(
        self, name: str, version: str, door: Door, method: str, arrival: Arrival | None = None
    ) -> CallPlace | None:
        return await self.admit(name, version, door, method, arrival) if current_place.get() is None else None

    async def _lease(self, name: str, version: str, door: Door, method: str) -> Lease:
        try:
            return await self.registry.lease(name, version)
        except ServerError as error:
            raise door.words(error, method) from None

    def count_unparsed(
        self, name: str, version: str, error: ServerError, door: Door, received: int = 0, *, method: str = ""
    ) -> None:
        """Count a call whose body was not or could not be read, if its service exists (OVMS: as a failed infer)."""
        versions = self.registry.available_versions(name)
        try:
            self.registry.peek(name, version)
        except ServerError:
            return
        serving = version if version.strip("0") else str(versions[-1])
        event = CallEvent(name, serving, self.registry.kind_of(name), door, method or door.infer, received=received)
        event.is_read = False
        self._start(event)
        self._end(event, error)

    # Administration

    async def reload_config(self) -> bool:
        """Bring what is served in line with the configuration; True if anything changed.

        Raises:
            ServerError: the configuration cannot be used; what was served goes on.
            NotSupported: the server was started without anything to reload.

        Cancellation: at once; the registry goes on with a change that it has begun.
        """
        if self._reload is None:
            raise NotSupported("this server has no configuration to reload")
        return await self._reload()

    def render_metrics(self, families: Sequence[str] = (), *, is_open: bool = False) -> bytes | None:
        """Print the metrics, or those of the families named; see ``Metrics.render``; None when they are off."""
        return None if self._metrics is None else self._metrics.render(families, is_open=is_open)

    # Observers

    def note_refused_caller(self, reason: str) -> None:
        """Count a request that is refused because of who makes it; see ``Gate.refused``."""
        if self._metrics is not None:
            self._metrics.refused(reason)

    @contextmanager
    def _worded(self, door: Door, method: str) -> Iterator[None]:
        """Put the refusals of a look-up into the door's words."""
        try:
            yield
        except ServerError as error:
            raise door.words(error, method) from None

    def _note_question(self, method: str, name: str, version: str, door: Door) -> None:
        if versions := self.registry.available_versions(name):
            event = CallEvent(name, version or str(versions[-1]), self.registry.kind_of(name), door, method)
            self._end(event, None)
