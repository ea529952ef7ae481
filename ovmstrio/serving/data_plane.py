"""Data plane: the protocol-independent operations that every front end calls.

It looks services up, admits and observes calls, and gives each protocol the same errors::

    front end ──> DataPlane.infer ───────> Registry.lease ──> Servable.infer
              ├─> DataPlane.open_stream ─> Registry.lease ──> StreamingServable.open_stream
              └─> DataPlane.call ────────> Registry.lease ──> any service that takes other calls than tensors
                      │ creates a CallEvent and notifies the observers
"""

from __future__ import annotations

import math
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast, overload

import trio

from ovmstrio.core.errors import (
    DeadlineExceeded,
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
from ovmstrio.core.events import (
    CANCELLED,
    OK,
    CallEvent,
    CallObserver,
    StreamProgress,
    current_event,
    current_request,
    current_request_id,
)
from ovmstrio.core.limits import current_ticket
from ovmstrio.core.service import SequenceServable
from ovmstrio.core.tensor import Tensor
from ovmstrio.serving.admission import Admission, ServiceLimits, attach_place, count_service_call
from ovmstrio.serving.calls import ObservedCall, ResponseBudget, error_label
from ovmstrio.serving.interfaces import HANDLERS_HTTP, KSERVE_GRPC, KSERVE_REST, TENSORFLOW_GRPC, TENSORFLOW_REST
from ovmstrio.serving.kind import CallType
from ovmstrio.serving.load_shedding import CallCounts
from ovmstrio.serving.open_stream import OpenStream
from ovmstrio.serving.records import Readiness
from ovmstrio.serving.registry import parse_version
from ovmstrio.serving.requested_outputs import (
    StreamOutputs,
    check_outputs,
    classify_large_outputs,
    has_plain_outputs,
    select_outputs,
)
from ovmstrio.serving.shared_memory import ClientRegions, check_room, map_tensors, write_outputs
from ovmstrio.telemetry.call_statistics import CallStatistics
from ovmstrio.telemetry.log_rate_limit import DeniedChangeLog
from ovmstrio.transport.send_budget import current_connection_budget
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence

    from ovmstrio.core.events import ApiInterface, Interface
    from ovmstrio.core.limits import AdmissionTicket
    from ovmstrio.core.request import ArrivalTicket, InferRequest, InferResponse
    from ovmstrio.core.service import SequenceInfo, StreamingServable
    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.core.worker_peers import WorkerPeers
    from ovmstrio.serving.instances import Lease
    from ovmstrio.serving.model_control import ModelControl
    from ovmstrio.serving.records import VersionStatus
    from ovmstrio.serving.registry import Registry
    from ovmstrio.telemetry.call_statistics import VersionStatistics
    from ovmstrio.telemetry.metrics import Metrics
    from ovmstrio.telemetry.recent_traces import RecentTraces


class CallObservers:
    """Notifies a fixed list of observers of call events, and keeps the call statistics."""

    def __init__(self, observers: Sequence[CallObserver]) -> None:
        self._started: tuple[Callable[[CallEvent], None], ...] = _overridden_methods(observers, "call_started")
        self._moved: tuple[Callable[[CallEvent, StreamProgress], None], ...] = _overridden_methods(
            observers, "call_moved"
        )
        self._finished: tuple[Callable[[CallEvent], None], ...] = _overridden_methods(observers, "call_finished")
        self._failed: tuple[Callable[[CallEvent], None], ...] = _overridden_methods(observers, "call_failed")
        self.statistics = CallStatistics()

    def start(self, event: CallEvent, lease: Lease | None = None) -> None:
        """Report that a call has found its service, and make the event current in the running task."""
        if lease is not None and lease.waited_seconds:
            event.queue_seconds = lease.waited_seconds
            event.started -= lease.waited_seconds
        if (request_id := current_request_id.get()) is not None:
            event.request_id = request_id.settle(event.request_id)
        current_event.set(event)
        request = current_request.get()
        if request is not None:
            event.request, request.event = request.record, event
        for notify in self._started:
            notify(event)

    def move(self, event: CallEvent, step: StreamProgress) -> None:
        """Report a step of a call."""
        for notify in self._moved:
            notify(event, step)

    def end(self, event: CallEvent, error: BaseException | None) -> None:
        """Report that a call has ended, with the error that ended it."""
        event.seconds = perf_counter() - event.started
        event.code = event.code or (OK if error is None else error_label(error))
        event.error = event.error or error
        if not event.compute_seconds:
            event.compute_seconds = event.seconds - event.queue_seconds
        self.statistics.call_finished(event)
        for notify in self._finished:
            notify(event)
        if event.code != OK:
            for notify in self._failed:
                notify(event)
        current_event.set(None)


def _overridden_methods(observers: Sequence[CallObserver], name: str) -> tuple[Any, ...]:
    """Return the observers' implementations of a method, without those that inherit the empty default."""
    default = getattr(CallObserver, name)
    return tuple(getattr(each, name) for each in observers if getattr(type(each), name, default) is not default)


class _GiveUpObserver(CallObserver):
    def __init__(self, record: Callable[[CallEvent], None]) -> None:
        self._record = record

    def call_failed(self, event: CallEvent) -> None:
        if event.code in _GIVEN_UP:
            self._record(event)


_GIVEN_UP: Final = frozenset({CANCELLED, DeadlineExceeded.__name__})
_SHED_INTERFACES: Final = frozenset({KSERVE_GRPC, KSERVE_REST, TENSORFLOW_GRPC, TENSORFLOW_REST, HANDLERS_HTTP})
"""Interfaces of calls with one response; generated texts and pipelines of Ops have queues with limits."""

_T = TypeVar("_T")

_ON_LOOP_BYTES: Final[dict[Interface, int]] = {"gRPC": 2 * 2**20, "REST": 256 * 1024}
"""Output sizes that render within a millisecond or two: copied (gRPC) or as JSON text (REST)."""
_RENDER_THREADS: Final = 2


class ResponseRenderer:
    """Serializes responses: small ones on the event loop, large ones in a thread, too large ones never."""

    def __init__(self, max_bytes: float = math.inf) -> None:
        self.max_output_bytes = max_bytes
        # More threads would only compete with the event loop for the interpreter lock.
        self._threads = trio.CapacityLimiter(_RENDER_THREADS)

    def fits_on_loop(self, response: InferResponse, api_interface: ApiInterface) -> bool:
        """Return True if a response is small enough to be rendered on the event loop, without :meth:`render`.

        Raises:
            PayloadTooLarge: the outputs are too large.
        """
        only = response.outputs[0] if len(response.outputs) == 1 else None
        # Hot path: most responses have one numeric output.
        size = only.array.nbytes if type(only) is Tensor and not only.array.dtype.hasobject else response.nbytes
        if size > self.max_output_bytes:
            raise PayloadTooLarge.of_outputs(size, self.max_output_bytes)
        return size <= _ON_LOOP_BYTES[api_interface.interface] or (
            api_interface.interface == "gRPC" and response.lies_as_sent
        )

    async def render(
        self, write: Callable[[InferResponse], _T], response: InferResponse, api_interface: ApiInterface
    ) -> _T:
        """Return ``write(response)``, computed in a thread if the response is large.

        Cancellation takes effect while waiting for a thread, not while writing.

        Raises:
            PayloadTooLarge: the outputs are too large; nothing has been copied.
        """
        if self.fits_on_loop(response, api_interface):
            return write(response)
        return await trio.to_thread.run_sync(write, response, limiter=self._threads)


# ----------------------------------------------------------------------
# Inference with output options
# ----------------------------------------------------------------------


async def _within_timeout(
    request: InferRequest, computing: Coroutine[Any, Any, InferResponse], waited_seconds: float
) -> InferResponse:
    request.deadline = min(request.deadline, trio.current_time() + request.timeout_seconds - waited_seconds)
    with trio.CancelScope(deadline=request.deadline):
        return await computing
    raise DeadlineExceeded(
        f"the request's timeout of {request.timeout_seconds * 1e6:.0f} microseconds passed before its inference ended"
    )


async def infer_with_options(request: InferRequest, lease: Lease, regions: ClientRegions) -> InferResponse:
    """Infer with output selection, classification and shared memory.

    Cancellation leaves regions unwritten.

    Raises:
        InvalidRequest: an output or region is unknown; raised before inference.
    """
    if request.outputs:
        check_outputs(request.outputs, lease.servable.metadata.outputs)
    places = map_tensors(request, regions)
    if places and lease.servable.metadata.has_sequences:
        # A step that fails after its inference would have changed its sequence.
        check_room(request, places, lease.servable.metadata.outputs)
    answer = await lease.servable.infer(request)
    if request.outputs:
        select_outputs(answer, request.outputs)
        await classify_large_outputs(answer, request.outputs, lease.servable.metadata.labels)
        await write_outputs(answer, places)
    return answer


# ----------------------------------------------------------------------
# Descriptions and error texts
# ----------------------------------------------------------------------

DEFAULT_SERVER_NAME: Final = "OpenVINO Model Server"
"""Server name in metadata; OVMS clients check it."""


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Metadata of one servable.

    ``versions`` are all available versions, ascending; ``serving`` is the requested one.  For ``joined_rows`` see
    ``ServableMetadata``.
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


class CallSignature(NamedTuple):
    """Inputs, outputs and streaming capability of a servable."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    has_streams: bool


def streaming_service_missing(name: str) -> ServiceMissing:
    """Return the error for a stream to a name under which no streaming service is served."""
    return ServiceMissing(f'nothing that can be streamed to is served under the name "{cut(name, 80)}"')


def unsupported_call_message(lease: Lease, untaken: str) -> str:
    """Return the error text for an unsupported call type, with the call types that the service takes."""
    call_forms = {
        CallType.TENSORS: "with single requests",
        CallType.HTTP: f"at /{lease.name}",
        CallType.GRPC: "by its own gRPC services",
        CallType.STREAMS: "by streams",
        CallType.PAYLOADS: "below /v3",
        CallType.GENERATION: "by OpenAI's API below /v3",
    }
    supported = " or ".join(form for call_types, form in call_forms.items() if call_types in lease.call_types)
    return f'the {lease.kind} "{lease.name}" takes no {untaken}; call it {supported}'


# ----------------------------------------------------------------------
# The data plane
# ----------------------------------------------------------------------

STARTING: Final = "the listeners are not bound yet"
DRAINING: Final = "the server is shutting down"


class DataPlane:
    """The operations of one server, independent of any protocol.

    Args:
        registry: the served services.
        reload: applies the configuration to the registry and returns True if anything changed; None without one.
        observers: notified of every call of an existing service.
        metrics: None when metrics are off.
        unready_reason: returns the reason why the server is unready although everything is loaded, or an empty string.
        max_response_bytes: largest size of a response's outputs, or of one stream reply's.
        admission: concurrency limits; by default those of the service configurations.
        regions: shared-memory regions of clients; by default none are allowed.
        traces: the most recent traces; None when not kept.
        control: loads and unloads by name; None where that is not supported.

    Attributes:
        peers: the other worker processes; None with a single one.
        is_draining: whether this process drains.
        ports: TCP ports by protocol, grpc and rest, once the server listens.
        workers_reason: why the server chose its number of workers; empty if the user did.
        denials: log of denied admin changes.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        reload: Callable[[], Awaitable[bool]] | None = None,
        observers: Sequence[CallObserver] = (),
        metrics: Metrics | None = None,
        unready_reason: Callable[[], str] | None = None,
        max_response_bytes: float = math.inf,
        admission: Admission | None = None,
        regions: ClientRegions | None = None,
        control: ModelControl | None = None,
        server_name: str = DEFAULT_SERVER_NAME,
        traces: RecentTraces | None = None,
    ) -> None:
        self.registry = registry
        self.server_name = server_name
        self.traces = traces
        self.control = control
        self.regions = regions or ClientRegions()
        self.peers: WorkerPeers | None = None
        self.is_draining = False
        self.ports: dict[str, int] = {}
        self.workers_reason = ""
        self.denials = DeniedChangeLog()
        self._renderer = ResponseRenderer(max_response_bytes)
        self._admission = admission or Admission(limit_of=registry.limit_of)
        self._has_limit = self._admission.has_server_limit
        self._own_limits = ServiceLimits(registry)
        self._unready_reason = unready_reason
        self._reload = reload
        own = (_GiveUpObserver(self._record_give_up), *(() if metrics is None else (metrics,)))
        calls = CallObservers((*observers, *own))
        self._start, self._move, self._end, self.call_statistics = calls.start, calls.move, calls.end, calls.statistics
        self._metrics = metrics
        self._metered: set[str] = set()
        self._response_budget = ResponseBudget()
        self._not_serving = STARTING
        self._changed = trio.Event()
        registry.subscribe(self._on_status)
        registry.subscribe_readiness(lambda _: self.announce())

    # Life cycle

    def is_live(self) -> bool:
        """Return True: a process that runs this is live."""
        return True

    def readiness(self) -> Readiness:
        """Return whether the server is ready, with the reason if it is not."""
        if self._not_serving:
            return Readiness(ready=False, reason=self._not_serving)
        readiness = self.registry.readiness
        if readiness.ready and self._unready_reason is not None and (reason := self._unready_reason()):
            return Readiness(ready=False, reason=reason)
        return readiness

    @property
    def is_shutting_down(self) -> bool:
        """True if the server drains, and not only this worker of it."""
        return self._not_serving == DRAINING

    def begin_serving(self) -> None:
        """Mark the listeners as bound."""
        self._not_serving = ""
        self.announce()

    def begin_drain(self, *, is_restart: bool = False) -> None:
        """Mark the server as shutting down; it is not ready from now on.

        In a rolling restart of workers, the server stays ready.
        """
        self.is_draining = True
        if not is_restart:
            self._not_serving = DRAINING
        self.announce()

    async def wait_change(self) -> None:
        """Return at the next change of the readiness of the server or of a service."""
        await self._changed.wait()

    def announce(self) -> None:
        """Wake the tasks in :meth:`wait_change` and update the readiness metric."""
        self._changed.set()
        self._changed = trio.Event()
        if self._metrics is not None:
            self._metrics.child("ovmstrio_ready").set(self.readiness().ready)

    def _on_status(self, status: VersionStatus) -> None:
        if self.registry.is_removed(status.name):
            self._metered.discard(status.name)
        self.announce()

    # Queries

    def statuses(self) -> dict[str, list[VersionStatus]]:
        """Return the state of every version ever seen, by service name."""
        return self.registry.statuses()

    def has_service(self, name: str) -> bool:
        """Return whether a name is configured, or can be loaded."""
        return self.registry.knows(name) or (self.control is not None and name in self.control.names)

    def model_ready(self, name: str, version: str, api_interface: ApiInterface) -> bool:
        """Return True if a version, or the default one, is available.

        Raises:
            NotFound: the name or version is unknown.
            InvalidRequest: the version is not a number.
        """
        with self._translated_errors(api_interface, api_interface.ready):
            ready = self.registry.is_ready(name, version)
        self._count_query(api_interface.ready, name, "", api_interface)
        return ready

    def model_status(self, name: str, version: int, api_interface: ApiInterface) -> list[VersionStatus]:
        """Return the state of one version, or of all with 0, as TensorFlow Serving's ``GetModelStatus``.

        Raises:
            NotFound: the name or version is unknown.
        """
        with self._translated_errors(api_interface, api_interface.status):
            statuses = self.registry.version_statuses(name, version)
        self._count_query(api_interface.status, name, "", api_interface)
        return statuses

    def model_metadata(self, name: str, version: str, api_interface: ApiInterface) -> ModelMetadata:
        """Return the metadata of a version, or of the default one; raises as ``Registry.peek``."""
        with self._translated_errors(api_interface, api_interface.metadata):
            known = self.registry.peek(name, version).metadata
        versions = self.registry.available_versions(name)
        serving = str(asked if (asked := int(version or 0)) in versions else versions[-1])
        self._count_query(api_interface.metadata, name, serving, api_interface)
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
            CallType.STREAMS in self.registry.call_types(name, version),
        )

    def statistics(
        self, name: str, version: str, api_interface: ApiInterface
    ) -> list[tuple[str, str, VersionStatistics]]:
        """Return the call statistics of a version, of a name, or of all services; raises as ``Registry.peek``."""
        number = parse_version(version)
        if name:
            with self._translated_errors(api_interface, api_interface.metadata):
                self.registry.peek(name, version)
        names = [name] if name else sorted(self.registry.statuses())
        every = ((each, str(known)) for each in names for known in self.registry.available_versions(each))
        return self.call_statistics.of(pair for pair in every if not number or pair[1] == str(number))

    def sequences(self, name: str, version: str, api_interface: ApiInterface) -> list[SequenceInfo]:
        """Return the live sequences of a version of a stateful model, sorted by id; raises also as ``Registry.peek``.

        Raises:
            NotSupported: the model is not stateful.
        """
        with self._translated_errors(api_interface, api_interface.metadata):
            servable = self.registry.peek(name, version)
        if not isinstance(servable, SequenceServable):
            raise NotSupported(f"{name!r} has no sequences: it is not a stateful model")
        return servable.sequences()

    # Calls

    def has_limits(self) -> bool:
        """Return whether any concurrency limit is configured, or set by a service or for its overload."""
        return (
            self._has_limit or self.registry.has_limits or bool(self._own_limits.limited) or self._admission.is_shedding
        )

    async def admit(
        self,
        name: str,
        version: str,
        api_interface: ApiInterface,
        method: str = "",
        arrival: ArrivalTicket | None = None,
    ) -> AdmissionTicket | None:
        """Take a place for a call before its body is decoded; return None if there is no limit or no such service.

        The caller sets the place as the :data:`current_ticket` of the task that makes the call, and releases it at the
        end. A call without a place takes one itself.

        Raises:
            Overloaded: the queue is full; the refusal has been counted.
            TooManyRequests: the service's own limit is reached; the refusal has been counted.
        """
        if not self.has_limits() or not self.registry.knows(name):
            return None
        if arrival is not None:
            arrival.call(name)
            await arrival.take_turn()
        if self._metrics is not None and name not in self._metered and self.registry.is_configured(name):
            self._metered.add(name)
            self._metrics.add_limited_service(name, lambda: self._admission.queued(name))
        place = None
        try:
            is_shed = api_interface in _SHED_INTERFACES and not (method and method == api_interface.stream)
            place = await self._admission.enter(name, interface=api_interface.interface if is_shed else None)
            self._own_limits.hold(name, place)
        except Overloaded as error:
            if place is not None:
                place.release()
            self._count_refused(name, version, error, api_interface, method or api_interface.infer)
            raise
        return place

    async def call_admitted(
        self,
        api_interface: ApiInterface,
        name: bytes,
        answer: Callable[[], Awaitable[_T]],
        *,
        method: str = "",
        arrival: ArrivalTicket | None = None,
    ) -> _T:
        """Take a place for the service named by the first bytes of a message, if there is one, and call ``answer``.

        ``method`` is the metric label, by default the interface's inference; ``arrival`` is set if the order matters.
        Usual clients write the name as the first field. A message that repeats the field with another name, which then
        counts, takes its place when the message is decoded (:func:`ovmstrio.serving.admission.release_unless_named`).

        Raises:
            Overloaded: the queue is full.
        """
        place = await self.admit(name.decode(errors="replace"), "", api_interface, method, arrival)
        if place is None:
            return await answer()
        current_ticket.set(place)
        try:
            return await answer()
        finally:
            place.release()

    def _record_give_up(self, event: CallEvent) -> None:
        """Record a call whose client has disconnected, or whose deadline has passed, for the shedding of load."""
        name = event.name
        if (
            self.is_draining
            or event.api_interface not in _SHED_INTERFACES
            or event.method == event.api_interface.stream
        ):
            return
        known = (
            self.call_statistics.versions.get((name, str(each))) for each in self.registry.available_versions(name)
        )
        versions = [each for each in known if each is not None]
        succeeded = sum(each.success.count for each in versions)
        ended = succeeded + sum(each.fail.count for each in versions)
        fastest = min((each.fastest_success for each in versions), default=math.inf)
        counts = CallCounts(ended, succeeded, self.registry.in_flight().get(name, 0), fastest)
        self._admission.record_give_up(name, event.api_interface.interface, event.seconds, counts)

    def _count_refused(
        self, name: str, version: str, error: Overloaded, api_interface: ApiInterface, method: str
    ) -> None:
        if self._metrics is not None:
            self._metrics.rejected(error, name)
        self.count_unreadable_call(name, version, error, api_interface, method=method)

    @overload
    async def infer(self, request: InferRequest, api_interface: ApiInterface) -> InferResponse: ...

    @overload
    async def infer(
        self, request: InferRequest, api_interface: ApiInterface, render: Callable[[InferResponse], tuple[_T, int]]
    ) -> _T: ...

    async def infer(
        self,
        request: InferRequest,
        api_interface: ApiInterface,
        render: Callable[[InferResponse], tuple[Any, int]] | None = None,
    ) -> Any:
        """Infer and return the response, or the object that ``render`` makes of it together with its size in bytes.

        Requested outputs keep the order of the request.  Inference waits while the send budget of the client or of the
        server is exhausted.  The request's buffers must stay unchanged until this returns.

        Raises:
            ServerError: from the look-up or the servable.
        """
        method, arrival = api_interface.infer, request.arrival
        now = None if self.has_limits() else self.registry.lease_now(request.model_name, request.model_version)
        lease = now or await self._lease_later(request, api_interface)
        # No `with lease`: it would cost two more function calls per inference.
        try:
            if CallType.TENSORS not in lease.call_types:
                raise NotSupported(unsupported_call_message(lease, "tensors"))
            if arrival is not None:
                await self._take_turn(arrival, request.model_name, lease)
            share, room, key = current_connection_budget.get(), self._response_budget, lease.name
            size = 0 if share is None else room.take(share, key) or await room.wait(share, key, lease.servable)
            event = CallEvent(
                lease.name, lease.version, lease.kind, api_interface, method, request.id, request.received
            )
            request.event = event
            self._start(event, lease)
            try:
                if arrival is not None and lease.has_order:
                    await arrival.take_turn()
                    arrival.settle()
                is_plain = has_plain_outputs(request, lease.servable.metadata.outputs if request.outputs else ())
                computing = (
                    lease.servable.infer(request) if is_plain else infer_with_options(request, lease, self.regions)
                )
                if request.timeout_seconds < math.inf:
                    computing = _within_timeout(request, computing, lease.waited_seconds)
                answer: Any = await computing
                if is_plain and request.outputs:
                    select_outputs(answer, request.outputs)
                if render is not None:
                    renderer = self._renderer
                    at_once = renderer.fits_on_loop(answer, api_interface)
                    answer, event.sent = (
                        render(answer) if at_once else await renderer.render(render, answer, api_interface)
                    )
                    if event.sent != size:
                        self._response_budget.learn(lease.name, event.sent)
            except BaseException as error:
                self._end(event, error)
                raise
            finally:
                if share is not None:
                    share.release(size)
            self._end(event, None)
            return answer
        finally:
            lease.release()

    async def _take_turn(self, arrival: ArrivalTicket, name: str, lease: Lease) -> None:
        """Wait for a request's turn if order matters, else let later requests proceed."""
        if lease.has_order:
            arrival.call(name)
            await arrival.take_turn()
        else:
            arrival.settle()

    async def _lease_later(self, request: InferRequest, api_interface: ApiInterface) -> Lease:
        """Lease a service where that may wait; later requests for other services do not wait for this one."""
        if (arrival := request.arrival) is not None:
            arrival.call(request.model_name)
        wanted = request.model_name, request.model_version, api_interface, api_interface.infer
        return await (self._admitted_lease(*wanted, arrival) if self.has_limits() else self._lease(*wanted))

    async def call(
        self,
        name: str,
        api_interface: ApiInterface,
        method: str,
        *,
        request_id: str = "",
        received: int = 0,
        is_stream: bool = False,
        is_unlimited: bool = False,
    ) -> ObservedCall:
        """Lease a service for a call without tensors; the call ends with the ``with`` block of the returned object.

        It waits while the send budget of the client or of the server is exhausted; with ``is_stream``, each reply waits
        for the budget separately.  With ``is_unlimited``, the call is exempt from all limits.

        Raises:
            NotFound: the name is unknown or retired.
            VersionLoading: the service was not loaded in time.
            Overloaded: the concurrency limit is reached and the queue is full.
        """
        take = self._admitted_lease if self.has_limits() and not is_unlimited else self._lease
        lease = await take(name, "", api_interface, method)
        try:
            if not is_unlimited:
                count_service_call(lease)
            room = await self._response_budget.enter(f"{name}/{method}", is_stream=is_stream)
        except BaseException as error:
            lease.release()
            if isinstance(error, TooManyRequests):
                self._count_refused(name, lease.version, error, api_interface, method)
            raise
        event = CallEvent(name, lease.version, lease.kind, api_interface, method, request_id, received)
        self._start(event, lease)
        return ObservedCall(lease, event, self._end, room)

    async def describe(self, name: str, version: str, api_interface: ApiInterface) -> CallSignature:
        """Return inputs and outputs of a version, or of the default one, waiting for one that is loading.

        Unlike :meth:`model_metadata`, this is part of another call and is not observed.  Raises as ``Registry.lease``.
        """
        with await self._lease(name, version, api_interface, api_interface.infer) as lease:
            servable = lease.servable
            known = servable.metadata
            return CallSignature(known.inputs, known.outputs, CallType.STREAMS in lease.call_types)

    async def takes_streams(self, name: str) -> bool:
        """Return True if a stream to a name must be opened, False if each message is a separate call.

        Also true for names that accept neither: :meth:`open_stream` then raises the reason.
        """
        try:
            with await self.registry.lease(name) as lease:
                return CallType.STREAMS in lease.call_types or CallType.TENSORS not in lease.call_types
        except ServerError:
            return True

    @asynccontextmanager
    async def open_stream(self, first: InferRequest, api_interface: ApiInterface) -> AsyncIterator[OpenStream]:
        """Open a stream with its first request, whose version is ignored: streaming services have only one.

        The block must not be left before the replies have ended, unless by an error or cancellation.

        Raises:
            NotFound: on entering, if no streaming service has that name.
            ServerError: on entering, if the look-up or the start fails; on leaving, if the stream fails.
        """
        with await self._lease_stream(first.model_name, api_interface) as lease:
            if CallType.STREAMS not in lease.call_types:
                missing = api_interface.words(streaming_service_missing(first.model_name), api_interface.stream)
                raise ServiceMissing(f"{missing}: {unsupported_call_message(lease, 'streams')}")
            servable = cast("StreamingServable", lease.servable)
            await self._response_budget.enter(lease.name, is_stream=True)
            event = CallEvent(
                lease.name, lease.version, lease.kind, api_interface, api_interface.stream, first.id, first.received
            )
            self._start(event, lease)
            opened = None
            try:
                self._map_stream_inputs(first)
                outputs = StreamOutputs(first, servable.metadata)
                async with servable.open_stream(first) as stream:
                    opened = OpenStream(
                        stream,
                        event,
                        self._move,
                        max_bytes=self._renderer.max_output_bytes,
                        outputs=outputs,
                        prepare=self._map_stream_inputs,
                    )
                    yield opened
            except BaseException as error:
                if opened is None:
                    self._move(event, StreamProgress.REJECTED)
                self._end(event, error)
                raise
            finally:
                if opened is not None:
                    opened.settle()
            self._end(event, None)

    def _map_stream_inputs(self, request: InferRequest) -> None:
        """Map a stream request's shared-memory inputs; reject shared-memory outputs."""
        if map_tensors(request, self.regions):
            raise InvalidRequest("outputs in shared memory: the replies of a stream belong to none of its requests")

    async def _lease_stream(self, name: str, api_interface: ApiInterface) -> Lease:
        place = await self._take_place(name, "", api_interface, api_interface.stream)
        try:
            lease = await self.registry.lease(name)
            attach_place(lease, place)
            place = None
        except VersionRetired as error:
            self.count_rejected(error, name)
            raise api_interface.words(error, api_interface.stream) from None
        except NotFound as error:
            self.count_rejected(error, name)
            raise api_interface.words(streaming_service_missing(name), api_interface.stream) from None
        finally:
            if place is not None:
                place.release()
        return lease

    async def _admitted_lease(
        self, name: str, version: str, api_interface: ApiInterface, method: str, arrival: ArrivalTicket | None = None
    ) -> Lease:
        """Lease a service and attach a place, taking one if the call has none."""
        place = await self._take_place(name, version, api_interface, method, arrival)
        try:
            lease = await self._lease(name, version, api_interface, method)
            attach_place(lease, place)
            place = None
        finally:
            if place is not None:
                place.release()
        return lease

    async def _take_place(
        self, name: str, version: str, api_interface: ApiInterface, method: str, arrival: ArrivalTicket | None = None
    ) -> AdmissionTicket | None:
        return await self.admit(name, version, api_interface, method, arrival) if current_ticket.get() is None else None

    async def _lease(self, name: str, version: str, api_interface: ApiInterface, method: str) -> Lease:
        try:
            return await self.registry.lease(name, version)
        except ServerError as error:
            self.count_rejected(error, name)
            raise api_interface.words(error, method) from None

    def count_unreadable_call(
        self,
        name: str,
        version: str,
        error: ServerError,
        api_interface: ApiInterface,
        received: int = 0,
        *,
        method: str = "",
    ) -> None:
        """Count a call whose body could not be read as a failed inference (as OVMS does), if its service exists."""
        versions = self.registry.available_versions(name)
        try:
            self.registry.peek(name, version)
        except ServerError:
            return
        serving = version if version.strip("0") else str(versions[-1])
        event = CallEvent(
            name, serving, self.registry.kind_of(name), api_interface, method or api_interface.infer, received=received
        )
        event.is_read = False
        self._start(event)
        self._end(event, error)

    # Administration

    async def reload_config(self) -> bool:
        """Apply the configuration again; return True if anything changed.

        Raises:
            ServerError: the configuration cannot be used; what was served before stays.
            NotSupported: the server has no configuration.
        """
        if self._reload is None:
            raise NotSupported("this server has no configuration to reload")
        return await self._reload()

    def render_metrics(self, families: Sequence[str] = (), *, is_open: bool = False) -> bytes | None:
        """Return the metrics text, optionally of some families only; None when metrics are off."""
        return None if self._metrics is None else self._metrics.render(families, is_open=is_open)

    # Observers

    def count_refused_caller(self, reason: str) -> None:
        """Count a request refused for its credentials or quota; see ``Gate.refused``."""
        if self._metrics is not None:
            self._metrics.refused(reason)

    def count_rejected(self, error: ServerError, name: str = "") -> None:
        """Count a request that was rejected before it reached its service; names that are not served are not kept."""
        if self._metrics is not None:
            self._metrics.rejected(error, name if self.registry.knows(name) else "")

    @contextmanager
    def _translated_errors(self, api_interface: ApiInterface, method: str) -> Iterator[None]:
        """Convert look-up errors to the texts of the interface."""
        try:
            yield
        except ServerError as error:
            raise api_interface.words(error, method) from None

    def _count_query(self, method: str, name: str, version: str, api_interface: ApiInterface) -> None:
        if versions := self.registry.available_versions(name):
            event = CallEvent(name, version or str(versions[-1]), self.registry.kind_of(name), api_interface, method)
            self._end(event, None)
