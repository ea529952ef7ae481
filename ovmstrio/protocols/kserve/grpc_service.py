"""``inference.GRPCInferenceService``: the KServe v2 gRPC service with Triton's extensions, over the data plane.

Inference methods use core values, which the codec reads and writes; the other methods use betterproto2 messages.
Methods raise core errors, which the transport maps to statuses; admin methods raise ``PermissionDenied``.

Every message of a stream to a servable that takes single requests is a call, answered in message order::

    messages ── receive ──> one task each: admit, decode, DataPlane.infer ──> responses, in order ──> client
                   └ waits while too many calls, or too many expected response bytes, are in flight

A request's error is sent as a message; the stream continues.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

import trio
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from ovmstrio.core.errors import (
    InvalidRequest,
    NotFound,
    NotSupported,
    PayloadTooLarge,
    SequenceRestored,
    ServerError,
)
from ovmstrio.core.events import CANCELLED
from ovmstrio.core.request import (
    ENABLE_FINAL_RESPONSE,
    FINAL_RESPONSE,
    RESTORED_STEPS,
    ArrivalOrder,
    InferRequest,
    InferResponse,
    StreamProblem,
)
from ovmstrio.encoding.generated import inference as pb
from ovmstrio.encoding.protobuf_wire import first_string_field
from ovmstrio.protocols.admin.changes import AdminChanges
from ovmstrio.protocols.kserve.extensions import (
    NO_CUDA,
    TRACE_SETTINGS,
    change_log_settings,
    check_trace_settings,
    config_message,
    load_parameters,
    log_settings,
    repository_index,
    server_extensions,
    server_version,
    statistics_message,
    unload_parameters,
)
from ovmstrio.protocols.kserve.grpc_messages import (
    StreamInferResponse,
    decode_request,
    encode_response,
    encode_stream_response,
)
from ovmstrio.serving.admission import release_unless_named
from ovmstrio.serving.aggregate import aggregate_statistics
from ovmstrio.serving.broadcast_changes import register_region, server_model_control, unregister_region
from ovmstrio.serving.interfaces import KSERVE_GRPC
from ovmstrio.transport.grpc.call import OrderedHandler, current_call

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from ovmstrio.core.request import ArrivalTicket
    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.encoding.raw_contents import WrittenMessage
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.serving.open_stream import OpenStream
    from ovmstrio.serving.shared_memory import ClientRegion
    from ovmstrio.transport.grpc.call import Call

# Streams of single requests

_MAX_IN_FLIGHT: Final = 16
_MAX_QUEUED_BYTES: Final = 4 * 2**20  # Limit of the expected size of all responses that wait for their turn


async def _answer_requests(call: Call, plane: DataPlane, first: bytes) -> None:
    """Answer a stream whose first, undecoded message was received; raises ``GRPCError`` after earlier answers."""
    stream = _RequestStream(call, plane)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.receive, first, nursery)
        await stream.send()
        nursery.cancel_scope.cancel()
    if stream.failure is not None:
        raise stream.failure


class _PendingAnswer:
    """Response to a request, or its error."""

    __slots__ = ("data", "done", "failure")

    def __init__(self) -> None:
        self.data: WrittenMessage = b""
        self.done = trio.Event()
        self.failure: Exception | None = None


class _RequestStream:
    """Stream with its in-flight requests, in order; ``failure`` is the error that ended the stream."""

    def __init__(self, call: Call, plane: DataPlane) -> None:
        self._call = call
        self._plane = plane
        self._arrivals = ArrivalOrder()
        self._answers: deque[_PendingAnswer] = deque()
        self._largest: int | None = None
        self._is_over = False
        self._changed = trio.Event()
        self.failure: Exception | None = None

    async def receive(self, message: bytes | None, nursery: trio.Nursery) -> None:
        """Start a task per message until the client half-closes."""
        number = 0
        failure: Exception | None = None
        while message is not None and failure is None:
            while not self._has_room:
                await self._changed.wait()
            answer = _PendingAnswer()
            self._answers.append(answer)
            nursery.start_soon(self._answer, message, answer, self._arrivals.note(number))
            number += 1
            self._notify()
            try:
                message = await self._call.recv_message(is_decoded=False)
            except GRPCError as error:
                failure = error
        if failure is not None:
            last = _PendingAnswer()
            last.failure = failure
            last.done.set()
            self._answers.append(last)
        self._is_over = True
        self._notify()

    @property
    def _has_room(self) -> bool:
        """Return whether another request may start; the first runs alone because its response size is unknown."""
        count = len(self._answers)
        if not count:
            return True
        return count < _MAX_IN_FLIGHT and self._largest is not None and (count + 1) * self._largest <= _MAX_QUEUED_BYTES

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _answer(self, message: bytes, answer: _PendingAnswer, arrival: ArrivalTicket) -> None:
        try:
            answer.data = await self._answered(message, arrival)
        except Exception as error:  # noqa: BLE001 - any error ends the stream in this request's turn
            answer.failure = error
        finally:
            arrival.settle()
        self._largest = max(self._largest or 0, len(answer.data))
        answer.done.set()

    async def _answered(self, message: bytes, arrival: ArrivalTicket) -> WrittenMessage:
        request: InferRequest | None = None

        async def infer(name: bytes = b"") -> WrittenMessage:
            nonlocal request
            request = self._decode(message)
            release_unless_named(request.model_name, name)
            request.deadline, request.arrival = self._call.deadline, arrival
            if request.parameters:
                request.read_scheduling()
            return await self._plane.infer(request, KSERVE_GRPC, partial(_render_reply, request))

        try:
            if not self._plane.has_limits():
                return await infer()
            name = first_string_field(message)
            return await self._plane.call_admitted(KSERVE_GRPC, name, partial(infer, name), arrival=arrival)
        except ServerError as error:
            # An admission error precedes decoding, but its message needs the request's id.
            return _problem(request or self._decode(message), error)

    def _decode(self, message: bytes) -> InferRequest:
        request: InferRequest = self._call.decode(message)
        return request

    async def send(self) -> None:
        """Send the responses in request order until the stream ends."""
        while self._answers or not self._is_over:
            if not self._answers:
                await self._changed.wait()
                continue
            answer = self._answers[0]
            await answer.done.wait()
            if answer.failure is None:
                try:
                    await self._call.send_message(answer.data)
                except Exception as error:  # noqa: BLE001 - raised once all tasks have ended
                    answer.failure = error
            if answer.failure is not None:
                self.failure = answer.failure
                return
            self._answers.popleft()
            self._notify()


def _render_reply(request: InferRequest, response: InferResponse) -> tuple[WrittenMessage, int]:
    _mark_final(request, response)
    data = encode_stream_response(StreamInferResponse("", response))
    return data, len(data)


def _problem(request: InferRequest, error: ServerError) -> WrittenMessage:
    named = InferResponse(request.model_name, request.model_version, [], request.id)
    if isinstance(error, SequenceRestored):
        named.parameters[RESTORED_STEPS] = error.steps
    _mark_final(request, named)
    return encode_stream_response(StreamInferResponse(error.message, named))


def _mark_final(request: InferRequest, response: InferResponse) -> None:
    """Set ``triton_final_response`` if the request enables it."""
    if request.parameters.get(ENABLE_FINAL_RESPONSE) is True:
        response.parameters[FINAL_RESPONSE] = True


# Service


def _parameter_values(parameters: Mapping[str, pb.ModelRepositoryParameter]) -> dict[str, object]:
    return {
        name: next(
            (each for each in (one.bool_param, one.int64_param, one.string_param, one.bytes_param) if each is not None),
            None,
        )
        for name, one in parameters.items()
    }


def _check_repository(name: str) -> None:
    if name:
        raise InvalidRequest(f'repository_name: expected none, as this server has one repository, got "{name}"')


def _setting_value(value: pb.LogSettingsRequestSettingValue) -> object:
    choices = (value.bool_param, value.uint32_param, value.string_param)
    return next((each for each in choices if each is not None), None)


def _setting(value: bool | int | str) -> pb.LogSettingsResponseSettingValue:
    if isinstance(value, bool):
        return pb.LogSettingsResponseSettingValue(bool_param=value)
    if isinstance(value, int):
        return pb.LogSettingsResponseSettingValue(uint32_param=value)
    return pb.LogSettingsResponseSettingValue(string_param=value)


def _status(region: ClientRegion) -> pb.SystemSharedMemoryStatusResponseRegionStatus:
    return pb.SystemSharedMemoryStatusResponseRegionStatus(region.name, region.key, region.offset, region.byte_size)


async def _exchange(call: Call, stream: OpenStream) -> None:
    """Receive requests and send replies; an idle consumer exerts back-pressure by flow control."""
    failure: Exception | None = None

    async def receive() -> None:
        nonlocal failure
        try:
            async for request in call:
                await stream.send(request)
            stream.end()
        except trio.BrokenResourceError:
            # The stream has ended; the sender notices.
            pass
        except GRPCError as error:
            failure = _refusal(error)
            nursery.cancel_scope.cancel()
        except ServerError as error:
            failure = error
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        try:
            await _send_replies(call, stream)
        except (GRPCError, StreamTerminatedError) as error:
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        stream.set_code(_code_of(failure))
        raise failure


def _code_of(failure: Exception) -> str:
    """Return the status code to record for a stream that the transport ended."""
    if isinstance(failure, ServerError) and failure.__cause__ is None:
        return type(failure).__name__
    status = failure if isinstance(failure, GRPCError) else failure.__cause__
    return status.status.name if isinstance(status, GRPCError) else CANCELLED


def _refusal(error: GRPCError) -> InvalidRequest:
    """Convert a transport error into a core error."""
    kind = PayloadTooLarge if error.status is Status.RESOURCE_EXHAUSTED else InvalidRequest
    refusal = kind(error.message or "")
    refusal.__cause__ = error
    return refusal


async def _send_replies(call: Call, stream: OpenStream) -> None:
    async for reply in stream:
        if isinstance(reply, StreamProblem):
            data = encode_stream_response(StreamInferResponse(reply.message, reply.response))
        else:
            data = encode_stream_response(StreamInferResponse("", reply))
        await call.send_message(data, has_more=stream.has_reply)
        stream.count_sent(len(data))


_SERVICE: Final = "/inference.GRPCInferenceService"


class InferenceService(pb.GrpcInferenceServiceBase):
    """The service; without ``changes`` only clients on this machine may change the server."""

    def __init__(self, plane: DataPlane, changes: AdminChanges | None = None) -> None:
        self._plane = plane
        self._changes = changes or AdminChanges()

    def _change(self, change: str, **facts: object) -> AbstractContextManager[None]:
        return self._changes.making(change, current_call().client, **facts)

    def __mapping__(self) -> dict[str, Handler]:
        """Return the handlers by path."""
        return {
            **super().__mapping__(),
            f"{_SERVICE}/ModelInfer": OrderedHandler(self._model_infer, Cardinality.UNARY_UNARY, memoryview, bytes),
            f"{_SERVICE}/ModelStreamInfer": Handler(
                self._model_stream_infer, Cardinality.STREAM_STREAM, InferRequest, bytes
            ),
        }

    # Inference

    async def _model_infer(self, call: Call) -> None:
        data: bytes | memoryview = await call.recv_message()
        if self._plane.has_limits():
            name = first_string_field(data)
            answer = partial(self._answer_admitted, call, data, name)
            await self._plane.call_admitted(KSERVE_GRPC, name, answer, arrival=call.arrival)
        else:
            await call.send_message(await self._plane.infer(_request_of(call, data), KSERVE_GRPC, _render))

    async def _answer_admitted(self, call: Call, data: bytes | memoryview, name: bytes) -> None:
        request = _request_of(call, data)
        release_unless_named(request.model_name, name)
        await call.send_message(await self._plane.infer(request, KSERVE_GRPC, _render))

    async def _model_stream_infer(self, call: Call) -> None:
        """Answer a stream: one stream of a streaming servable, or one call per message for any other servable.

        If a streaming servable fails before the client half-closed, the error is sent as a message and as the status;
        afterwards only as the status.
        """
        first: bytes | None = await call.recv_message(is_decoded=False)
        if first is None:
            raise InvalidRequest("Client disconnected during reading first streaming request")
        name = first_string_field(first)
        model = name.decode(errors="replace") or call.decode(first).model_name
        if not await self._plane.takes_streams(model):
            await _answer_requests(call, self._plane, first)
        elif self._plane.has_limits():
            answer = partial(self._answer_stream, call, first, name)
            await self._plane.call_admitted(KSERVE_GRPC, name, answer, method=KSERVE_GRPC.stream)
        else:
            await self._answer_stream(call, first)

    async def _answer_stream(self, call: Call, data: bytes, name: bytes = b"") -> None:
        first: InferRequest = call.decode(data)
        release_unless_named(first.model_name, name)
        first.deadline = call.deadline
        opened = False
        try:
            async with self._plane.open_stream(first, KSERVE_GRPC) as stream:
                opened = True
                await _exchange(call, stream)
        except ServerError as error:
            if isinstance(error.__cause__, GRPCError):
                raise error.__cause__ from None
            if opened and not call.half_closed:
                await call.send_message(encode_stream_response(StreamInferResponse(error.message)))
            raise

    # Health and metadata

    async def server_live(self, _: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        """Return whether the server is live."""
        return pb.ServerLiveResponse(live=self._plane.is_live())

    async def server_ready(self, _: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        """Return whether the server is ready."""
        return pb.ServerReadyResponse(ready=self._plane.readiness().ready)

    async def model_ready(self, message: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        """Return whether a version, or the default version, is ready; a loadable model that is not loaded is not."""
        try:
            ready = self._plane.model_ready(message.name, message.version, KSERVE_GRPC)
        except NotFound:
            if self._plane.control is None or message.name not in self._plane.control.names:
                raise
            ready = False
        return pb.ModelReadyResponse(ready=ready)

    async def server_metadata(self, _: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        """Return the server's name, version and extensions."""
        return pb.ServerMetadataResponse(self._plane.server_name, server_version(), server_extensions(self._plane))

    async def model_metadata(self, message: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        """Return the inputs, outputs and callable versions of a servable."""
        model = self._plane.model_metadata(message.name, message.version, KSERVE_GRPC)
        return pb.ModelMetadataResponse(
            name=model.name,
            versions=model.versions,
            platform=model.platform,
            inputs=[_describe(spec) for spec in model.inputs],
            outputs=[_describe(spec) for spec in model.outputs],
        )

    # Configuration and statistics

    async def model_config(self, message: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        """Return the part of Triton's model configuration that load generators read."""
        model = self._plane.model_metadata(message.name, message.version, KSERVE_GRPC)
        return pb.ModelConfigResponse(config_message(model))

    async def model_statistics(self, message: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        """Return the call statistics of a version, of all versions of a model, or of all models."""
        counted = await aggregate_statistics(self._plane, message.name, message.version, KSERVE_GRPC)
        return pb.ModelStatisticsResponse([statistics_message(*each) for each in counted])

    # Repository

    async def repository_index(self, message: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        """List all known versions."""
        _check_repository(message.repository_name)
        entries = repository_index(self._plane, only_ready=message.ready)
        return pb.RepositoryIndexResponse(
            [
                pb.RepositoryIndexResponseModelIndex(entry.name, entry.version, entry.state, entry.reason)
                for entry in entries
            ]
        )

    async def repository_model_load(self, message: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        """Load a model; the load continues if the call is cancelled."""
        with self._change("load", model=message.model_name):
            _check_repository(message.repository_name)
            config, files = load_parameters(_parameter_values(message.parameters))
            await server_model_control(self._plane).load(message.model_name, config, files)
        return pb.RepositoryModelLoadResponse()

    async def repository_model_unload(
        self, message: pb.RepositoryModelUnloadRequest
    ) -> pb.RepositoryModelUnloadResponse:
        """Unload a model; the unload continues if the call is cancelled."""
        with self._change("unload", model=message.model_name):
            _check_repository(message.repository_name)
            with_callees = unload_parameters(_parameter_values(message.parameters))
            await server_model_control(self._plane).unload(message.model_name, with_callees=with_callees)
        return pb.RepositoryModelUnloadResponse()

    # Traces and logs

    async def trace_setting(self, message: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
        """Return that Triton traces are off; refuse to turn them on."""
        if message.settings:
            levels = [level for each in message.settings.values() for level in each.value]
            check_trace_settings(list(message.settings), levels)
        return pb.TraceSettingResponse(
            {name: pb.TraceSettingResponseSettingValue(value) for name, value in TRACE_SETTINGS.items()}
        )

    async def log_settings(self, message: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        """Change the given log settings and return all settings."""
        if message.settings:
            settings = {name: _setting_value(value) for name, value in message.settings.items()}
            with self._change("log settings", settings=settings):
                change_log_settings(settings)
        return pb.LogSettingsResponse({name: _setting(value) for name, value in log_settings().items()})

    # Shared memory

    async def system_shared_memory_status(
        self, message: pb.SystemSharedMemoryStatusRequest
    ) -> pb.SystemSharedMemoryStatusResponse:
        """List one region or all."""
        regions = self._plane.regions.listed(message.name)
        return pb.SystemSharedMemoryStatusResponse({region.name: _status(region) for region in regions})

    async def system_shared_memory_register(
        self, message: pb.SystemSharedMemoryRegisterRequest
    ) -> pb.SystemSharedMemoryRegisterResponse:
        """Register a region."""
        with self._change("shared memory registered", region=message.name):
            await register_region(self._plane, message.name, message.key, message.offset, message.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def system_shared_memory_unregister(
        self, message: pb.SystemSharedMemoryUnregisterRequest
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        """Unregister one region or all."""
        with self._change("shared memory unregistered", region=message.name):
            await unregister_region(self._plane, message.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def cuda_shared_memory_status(self, _: pb.CudaSharedMemoryStatusRequest) -> pb.CudaSharedMemoryStatusResponse:
        """Return no regions."""
        return pb.CudaSharedMemoryStatusResponse()

    async def cuda_shared_memory_register(
        self, _: pb.CudaSharedMemoryRegisterRequest
    ) -> pb.CudaSharedMemoryRegisterResponse:
        """Raise ``NotSupported``."""
        raise NotSupported(NO_CUDA)

    async def cuda_shared_memory_unregister(
        self, _: pb.CudaSharedMemoryUnregisterRequest
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        """Do nothing: there are no regions."""
        return pb.CudaSharedMemoryUnregisterResponse()


def _request_of(call: Call, data: bytes | memoryview) -> InferRequest:
    request = decode_request(data)
    request.deadline, request.arrival = call.deadline, call.arrival
    if request.parameters:
        request.read_scheduling()
    return request


def _render(response: InferResponse) -> tuple[WrittenMessage, int]:
    if response.parameters:
        current_call().add_trailers(*response.headers)
    data = encode_response(response)
    return data, len(data)


def _describe(spec: TensorSpec) -> pb.ModelMetadataResponseTensorMetadata:
    return pb.ModelMetadataResponseTensorMetadata(spec.name, spec.datatype.name, spec.reported_shape)
