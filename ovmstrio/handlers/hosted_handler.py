"""Worker-process side of an isolated handler: its object, threads and models on an event loop in a separate thread."""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import structlog
import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from ovmstrio.core.errors import MalformedPayload, UserCodeError
from ovmstrio.core.http_messages import AfterResponse, ByteStream, HttpAnswer, HttpRequest
from ovmstrio.handlers.batches import BatchedMethod, BatchItem, log_request_ids
from ovmstrio.handlers.config.project_file import read_project
from ovmstrio.handlers.config.project_spec import ProjectSpec
from ovmstrio.handlers.cortex.log import StdoutHandler
from ovmstrio.handlers.error_reporter import INTERNAL_ERROR, ErrorReporter
from ovmstrio.handlers.grpc.call import CallExecution
from ovmstrio.handlers.handler_loading import HandlerDependencies, LoadedHandler, open_handler
from ovmstrio.handlers.http_responses import HTTPError, convert_starlette_error
from ovmstrio.handlers.http_values import http_arguments, to_response
from ovmstrio.handlers.models.library import ProjectModels, open_models
from ovmstrio.isolation.code_host import RAISED, HostedObject, Invocation
from ovmstrio.isolation.exit_status import CHANNEL_CLOSED
from ovmstrio.isolation.messages import encode_error
from ovmstrio.isolation.user_code import UserCodeRaisedError, is_async

if TYPE_CHECKING:
    from ovmstrio.core.http_messages import Headers
    from ovmstrio.handlers.grpc.proto_compiler import Rpc, UserProto

# ----------------------------------------------------------------------
# Requests and responses as plain data
# ----------------------------------------------------------------------

ANSWER: Final = "answer"
_HTTP_ERROR: Final = "chosen"
_MALFORMED: Final = "malformed"


def encode_refusal(error: MalformedPayload | HTTPError) -> list[Any]:
    """Encode an error whose status and text are meant for the client."""
    if isinstance(error, HTTPError):
        return [_HTTP_ERROR, error.status_code, error.detail, error.headers]
    return [_MALFORMED, error.message, error.is_json]


def decode_refusal(row: list[Any]) -> MalformedPayload | HTTPError | None:
    """Decode an error encoded by :func:`encode_refusal`; None if the row is another kind."""
    kind, *rest = row
    if kind == _HTTP_ERROR:
        return HTTPError(*rest)
    return MalformedPayload(rest[0], is_json=rest[1]) if kind == _MALFORMED else None


class MethodRow(NamedTuple):
    """Description of a handler's method for the server."""

    name: str
    arguments: list[str]
    is_generator: bool
    is_batched: bool
    is_async: bool


class ResponseHead(NamedTuple):
    """Response without its body; ``after`` is the number of its callbacks, 0 for none."""

    status: int
    headers: list[list[str]]
    after: int

    def answer(self, body: Any, run_after: Callable[[int], None]) -> HttpAnswer:
        """Create the response; ``run_after`` is called with the number of the callbacks."""
        headers: Headers = tuple((name, value) for name, value in self.headers)
        number = self.after
        return HttpAnswer(self.status, headers, body, (lambda: run_after(number),) if number else ())


def encode_head(answer: HttpAnswer, after: int) -> list[Any]:
    """Encode a response without its body."""
    return [answer.status, [list(pair) for pair in answer.headers], after]


def encode_request(request: HttpRequest) -> list[Any]:
    """Encode a request."""
    return [request.method, request.path, request.query, [list(pair) for pair in request.headers], request.body]


def decode_request(row: list[Any]) -> HttpRequest:
    """Decode a request."""
    method, path, query, headers, body = row
    return HttpRequest(method, path, query, tuple((name, value) for name, value in headers), body)


# ----------------------------------------------------------------------
# Handler
# ----------------------------------------------------------------------

_END_SECONDS: Final = 15.0
_CHECK_SECONDS: Final = 0.5

ValueT = TypeVar("ValueT")


class _ForwardingReporter(ErrorReporter):
    """Error reporter that sends the errors of user code to the server, which logs and converts them."""

    def convert_error(self, error: BaseException, step: str) -> Exception:
        del step
        return UserCodeRaisedError(convert_starlette_error(error) or error)

    def invalid_result(self, step: str, problem: str) -> UserCodeError:
        del step
        return UserCodeError(INTERNAL_ERROR, detail=problem)


class _BatchReporter(_ForwardingReporter):
    def convert_error(self, error: BaseException, step: str) -> Exception:
        chosen = convert_starlette_error(error) or error
        if not isinstance(chosen, HTTPError):
            self.report(error, step)
        return chosen if isinstance(chosen, Exception) else UserCodeError(INTERNAL_ERROR)


class _LoopCaller:
    """Calls from threads to the event loop, cancellable as a group."""

    def __init__(self, loop: trio.lowlevel.TrioToken) -> None:
        self.loop = loop
        self._scope: trio.CancelScope | None = None
        self._is_stopped = False
        self._process = os.getpid()

    def run(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Run an async function on the loop; raise its errors, or InterruptedError if cancelled."""
        try:
            return trio.from_thread.run(self._run, function, args, trio_token=self.loop)
        except UserCodeRaisedError as raised:
            raise raised.error from None

    async def _run(self, function: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> Any:
        with trio.CancelScope() as self._scope:
            if not self._is_stopped:
                try:
                    return await function(*args)
                finally:
                    if os.getpid() != self._process:
                        # A fork in user code must not continue as a second worker.
                        os._exit(0)
        raise InterruptedError("cancelled")

    def stop(self) -> None:
        self._is_stopped = True
        self.loop.run_sync_soon(self._cancel)

    def _cancel(self) -> None:
        if self._scope is not None:
            self._scope.cancel()


class HostedHandler:
    """Handler hosted in a worker process; see :class:`HostedObject`.

    ``mounted_as`` is the name of the handler among other services; empty if it is the only service.
    """

    def __init__(self, file: str, mounted_as: str) -> None:
        self._file = Path(file)
        self._mounted_as = mounted_as
        self._ready = threading.Event()
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._loop: trio.lowlevel.TrioToken | None = None
        self._closing: trio.Event | None = None
        self._handler: LoadedHandler | None = None
        self._models: ProjectModels | None = None
        self._rpcs: HostedRpcs | None = None
        self._code: ErrorReporter = _BatchReporter("", Path())
        self._after: dict[int, tuple[AfterResponse, ...]] = {}
        self._numbers = itertools.count(1)

    def invoke(self, method: str, value: Any) -> Invocation:
        """Return the call to execute for a request of the server."""
        match method:
            case "make":
                return Invocation(self._load)
            case "finalize":
                return Invocation(self._finalize)
            case "info":
                return Invocation(_require(self._models).info)
        on_loop = _LoopCaller(self._token)
        functions: dict[str, Callable[..., Any]] = {"batch": self._batch, "rpc": self._call}
        function = functions.get(method, self._answer)
        return Invocation(function, (on_loop, *value), convert_item=lambda item: item, stop=on_loop.stop)

    def forget(self, value: Any) -> None:
        """Run the callbacks of a sent response, or pass a request message to a gRPC call."""
        if isinstance(value, list):
            number, data, is_failed = value
            self._token.run_sync_soon(partial(_require(self._rpcs).put_request, number, data, is_failed=is_failed))
            return
        callbacks = self._after.pop(value, ())
        self._token.run_sync_soon(self._loaded.run_after, callbacks)

    # Lifecycle

    def _load(self) -> list[Any]:
        threading.Thread(target=self._run_loop, name="handler event loop", daemon=True).start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure
        return [
            list(MethodRow(each.name, sorted(each.arguments), each.is_generator, each.is_batched, is_async(each.call)))
            for each in self._loaded.methods.values()
        ]

    def _run_loop(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as error:  # noqa: BLE001 - the border of user code
            if self._loop is not None:
                # Calls that wait for this loop would never return.
                os._exit(CHANNEL_CLOSED)
            self._failure = _first_exception(error)
        finally:
            self._ended.set()
            self._ready.set()

    async def _serve(self) -> None:
        project, _ = read_project(self._file, mounted_as=self._mounted_as)
        _enter_project(project)
        _watch_descriptors(self._ended)
        self._closing = trio.Event()
        async with self._open(project):
            self._loop = trio.lowlevel.current_trio_token()
            self._ready.set()
            await self._closing.wait()

    @asynccontextmanager
    async def _open(self, project: ProjectSpec) -> AsyncIterator[None]:
        if project.protobuf_path is not None:
            async with self._open_rpcs(project):
                yield
            return
        code = _ForwardingReporter(project.name, project.directory)
        self._code = _BatchReporter(project.name, project.directory)
        async with (
            open_models(project) as self._models,
            open_handler(
                project,
                HandlerDependencies(self._models.clients),
                error_reporter=code,
                is_only_service=True,
                batches_requests=False,
            ) as self._handler,
        ):
            yield

    @asynccontextmanager
    async def _open_rpcs(self, project: ProjectSpec) -> AsyncIterator[None]:
        # Not imported for HTTP handlers.
        from ovmstrio.handlers.grpc.call import NON_FAILURES  # noqa: PLC0415 - see above
        from ovmstrio.handlers.grpc.project import open_project_proto, open_rpc_handler  # noqa: PLC0415 - see above

        code = ServerErrorReporter(project.name, project.directory, NON_FAILURES)
        async with (
            open_models(project) as self._models,
            open_project_proto(project) as proto,
            open_rpc_handler(
                project, proto, clients=self._models.clients, is_only_service=True, error_reporter=code
            ) as self._handler,
            trio.open_nursery() as tasks,
        ):
            self._rpcs = HostedRpcs(proto, self._handler, tasks)
            yield
            tasks.cancel_scope.cancel()

    def _finalize(self) -> None:
        if self._loop is not None and self._closing is not None:
            self._loop.run_sync_soon(self._closing.set)
            self._ended.wait(_END_SECONDS)

    @property
    def _token(self) -> trio.lowlevel.TrioToken:
        return _require(self._loop)

    @property
    def _loaded(self) -> LoadedHandler:
        return _require(self._handler)

    # Requests

    def _answer(self, on_loop: _LoopCaller, name: str, row: list[Any], request_id: str) -> Any:
        try:
            answer: HttpAnswer = on_loop.run(self._call_method, name, row, request_id)
        except (MalformedPayload, HTTPError) as error:
            return encode_refusal(error)
        head = encode_head(answer, self._register_callbacks(answer.after))
        stream = answer.stream
        return [ANSWER, head, answer.content] if stream is None else _pieces(head, stream, on_loop)

    async def _call_method(self, name: str, row: list[Any], request_id: str) -> HttpAnswer:
        with log_request_ids(request_id):
            arguments = await http_arguments(self._loaded.methods[name].arguments, decode_request(row))
            result = await self._loaded.call(name, **arguments)
            return await to_response(result, self._loaded, name)

    def _call(self, on_loop: _LoopCaller, number: int, description: list[Any], first: bytes | None) -> Iterator[Any]:
        events: CallEvents = on_loop.run(_require(self._rpcs).start, number, description, first)
        return _iterate_events(events, on_loop)

    def _batch(self, on_loop: _LoopCaller, name: str, rows: list[list[Any]]) -> Any:
        return on_loop.run(self._call_batch, name, rows)

    async def _call_batch(self, name: str, rows: list[list[Any]]) -> list[Any]:
        responses: dict[int, Any] = {}
        items: dict[int, BatchItem] = {}
        method = self._loaded.methods[name]
        for position, (row, request_id) in enumerate(rows):
            try:
                items[position] = BatchItem(await http_arguments(method.arguments, decode_request(row)), request_id)
            except MalformedPayload as error:
                responses[position] = encode_refusal(error)
        if items:
            run = BatchedMethod(method, lambda method, given: self._loaded.call(method.name, **given), self._code)
            results = await run.run(list(items.values()))
            for position, result in zip(items, results, strict=True):
                responses[position] = await self._batch_response(name, result)
        return [responses[position] for position in range(len(rows))]

    async def _batch_response(self, name: str, result: Any) -> list[Any]:
        if isinstance(result, Exception):
            return encode_refusal(result) if isinstance(result, HTTPError) else [RAISED, encode_error(result)]
        try:
            answer = await to_response(result, self._loaded, name)
            stream = answer.stream
            body = answer.content if stream is None else b"".join([piece async for piece in stream])
        except UserCodeRaisedError as raised:
            return [RAISED, encode_error(raised.error)]
        except Exception as error:  # noqa: BLE001 - sent to the server
            return [RAISED, encode_error(error)]
        return [ANSWER, encode_head(answer, self._register_callbacks(answer.after)), body]

    def _register_callbacks(self, callbacks: tuple[AfterResponse, ...]) -> int:
        if not callbacks:
            return 0
        number = next(self._numbers)
        self._after[number] = callbacks
        return number


def _pieces(head: list[Any], body: ByteStream, on_loop: _LoopCaller) -> Iterator[Any]:
    try:
        yield head
        while True:
            try:
                yield on_loop.run(anext, body)
            except StopAsyncIteration:
                return
    finally:
        # A new caller: this one may be cancelled.
        _LoopCaller(on_loop.loop).run(body.aclose)


def _iterate_events(events: CallEvents, on_loop: _LoopCaller) -> Iterator[Any]:
    try:
        while (event := on_loop.run(events.take)) is not None:
            yield event
    finally:
        _LoopCaller(on_loop.loop).run(events.aclose)


def _require(found: ValueT | None) -> ValueT:
    if found is None:
        raise RuntimeError("handler not loaded")
    return found


def _enter_project(project: ProjectSpec) -> None:
    os.environ.update(project.environment)
    os.chdir(project.directory)
    # The server writes the lines of these loggers, in its own format.
    StdoutHandler.outlet = logging.getLogger().handlers[0]
    logging.getLogger().setLevel(project.log_level.upper())
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.stdlib.render_to_log_kwargs],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLogger().level),
        logger_factory=structlog.stdlib.LoggerFactory(),
    )


def _watch_descriptors(ended: threading.Event) -> None:
    sentinel, _ = os.pipe()

    def watch() -> None:
        while not ended.wait(_CHECK_SECONDS):
            try:
                os.fstat(sentinel)
            except OSError:
                os._exit(CHANNEL_CLOSED)

    # User code that closed foreign descriptors may have closed the channel, so an error cannot be reported.
    threading.Thread(target=watch, name="descriptor watcher", daemon=True).start()


def _first_exception(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def host_handler(argument: Any) -> HostedObject:
    """Create the host for ``[project file, mount name]``."""
    file, mounted_as = argument
    return HostedHandler(file, mounted_as)


# Calls over gRPC

HEADERS: Final = "headers"
REPLY: Final = "reply"
TRAILERS: Final = "trailers"
REQUEST_TAKEN: Final = "taken"
CANCEL: Final = "cancel"
LOG: Final = "log"
STATUS: Final = "status"
ENDED: Final = "ended"

_AHEAD: Final = 8
"""Maximum number of events queued for the server."""

_log_callback: Final[ContextVar[Callable[[BaseException, str], None] | None]] = ContextVar("log callback", default=None)


class ServerErrorReporter(ErrorReporter):
    """Error reporter that lets the server log errors of gRPC calls; other errors are logged here."""

    def report(self, error: BaseException, step: str) -> None:
        """Send an error to the server, inside a call; log it otherwise."""
        log_callback = _log_callback.get()
        if log_callback is None:
            super().report(error, step)
        else:
            log_callback(error, step)


@dataclass(frozen=True, slots=True)
class _Metadata:
    pairs: list[tuple[str, str | bytes]]

    def items(self) -> Iterable[tuple[str, str | bytes]]:
        return self.pairs


class _RemoteCall:
    """:class:`RpcCall` whose client is connected to the server process.

    ``description`` is path, metadata, user agent, client endpoint, and seconds until the deadline or None.
    """

    def __init__(
        self,
        rpc: Rpc,
        description: list[Any],
        emit: Callable[[list[Any]], Awaitable[None]],
        requests: trio.MemoryReceiveChannel[bytes | None],
        cancel: Callable[[], None],
    ) -> None:
        self.path, pairs, self.user_agent, self.client_endpoint, seconds = description
        self.metadata = _Metadata([(key, value) for key, value in pairs])
        self.deadline = math.inf if seconds is None else trio.current_time() + seconds
        self._rpc = rpc
        self._emit = emit
        self._requests = requests
        self._cancel = cancel

    def cancel(self) -> None:
        self._cancel()

    async def recv_message(self) -> Any:
        try:
            data = await self._requests.receive()
        except trio.EndOfChannel:
            raise StreamTerminatedError("no more requests can be read") from None
        await self._emit([REQUEST_TAKEN])
        return None if data is None else self._rpc.request_class.FromString(data)

    async def send_initial_metadata(self, *, metadata: Any = None) -> None:
        await self._emit([HEADERS, [list(pair) for pair in metadata or ()]])

    async def send_message(self, message: bytes) -> None:
        await self._emit([REPLY, message])

    async def send_trailing_metadata(self, *, status_message: str | None = None, metadata: Any = None) -> None:
        await self._emit([TRAILERS, status_message, [list(pair) for pair in metadata or ()]])


class CallEvents:
    """Events of one call for the server; closing cancels the call."""

    def __init__(self, scope: trio.CancelScope, received: trio.MemoryReceiveChannel[list[Any]]) -> None:
        self._scope = scope
        self._received = received

    async def take(self) -> list[Any] | None:
        """Return the next event, None after the last."""
        try:
            return await self._received.receive()
        except trio.EndOfChannel:
            return None

    async def aclose(self) -> None:
        """Cancel the call."""
        self._scope.cancel()
        await trio.lowlevel.checkpoint()


class HostedRpcs:
    """gRPC services of a handler; calls run in the nursery ``tasks``."""

    def __init__(self, proto: UserProto, handler: LoadedHandler, tasks: trio.Nursery) -> None:
        self._rpcs = {rpc.path: rpc for rpc in proto.rpcs}
        self._handler = handler
        self._tasks = tasks
        self._requests: dict[int, trio.MemorySendChannel[bytes | None]] = {}

    async def start(self, number: int, description: list[Any], first: bytes | None) -> CallEvents:
        """Start a call and return its events; the caller closes them.

        ``first`` is the request of a unary call; None for a stream of requests, which :meth:`put_request` passes.
        """
        # Unbounded: the server sends only as many requests as it has credits.
        sender, receiver = trio.open_memory_channel[bytes | None](math.inf)
        emit, received = trio.open_memory_channel[list[Any]](_AHEAD)
        if first is not None:
            sender.send_nowait(first)
            sender.send_nowait(None)
        else:
            self._requests[number] = sender
        scope = trio.CancelScope()

        def cancel() -> None:
            self._tasks.start_soon(emit.send, [CANCEL])

        rpc = self._rpcs[description[0]]
        call = _RemoteCall(rpc, description, emit.send, receiver, cancel)
        self._tasks.start_soon(partial(self._run, rpc, call, scope, emit, number))
        await trio.lowlevel.checkpoint()
        return CallEvents(scope, received)

    def put_request(self, number: int, data: bytes | None, *, is_failed: bool) -> None:
        """Pass a request to a call, None after the last; ``is_failed`` if no more can be read."""
        channel = self._requests.get(number)
        if channel is None:
            return
        if not is_failed:
            channel.send_nowait(data)
        if is_failed or data is None:
            self._requests.pop(number).close()

    async def _run(
        self, rpc: Rpc, call: _RemoteCall, scope: trio.CancelScope, emit: trio.MemorySendChannel[list[Any]], number: int
    ) -> None:
        errors: list[list[Any]] = []
        _log_callback.set(lambda error, step: errors.append([LOG, step, encode_error(error)]))
        with scope, emit:
            end = await self._end(rpc, call)
            for event in (*errors, end):
                await emit.send(event)
        self._requests.pop(number, None)

    async def _end(self, rpc: Rpc, call: _RemoteCall) -> list[Any]:
        try:
            await CallExecution(rpc, call, self._handler).run()
        except GRPCError as error:
            cause = error.__cause__
            encoded = None if cause is None else encode_error(cause)
            return [STATUS, Status(error.status).value, error.message, error.details, encoded]
        except StreamTerminatedError:
            return [STATUS, Status.CANCELLED.value, "the call is over", None, None]
        except Exception as error:  # noqa: BLE001 - sent to the server
            return [RAISED, encode_error(error)]
        return [ENDED]
