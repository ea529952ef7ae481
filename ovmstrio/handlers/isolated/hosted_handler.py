"""A handler in a worker process: the user's object, its threads and its models, on an event loop of their own."""

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
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog
import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from cortex_internal.lib.log import StdoutHandler
from ovmstrio.core.errors import MalformedPayload, UserCodeError
from ovmstrio.core.http import ByteStream, Callback, HttpAnswer
from ovmstrio.handlers.batches import BatchedMethod, BatchItem, in_log
from ovmstrio.handlers.building import Supplies, open_handler
from ovmstrio.handlers.config.project_file import read_project
from ovmstrio.handlers.config.project_spec import ProjectSpec
from ovmstrio.handlers.grpc.call_run import CallRun
from ovmstrio.handlers.handler import LoadedHandler
from ovmstrio.handlers.handler_code import HIDDEN, HandlerCode
from ovmstrio.handlers.http_results import HTTPError, starlette_error, to_answer
from ovmstrio.handlers.http_values import http_arguments
from ovmstrio.handlers.isolated.messages import ANSWER, MethodRow, answer_head, read_request, refusal_row
from ovmstrio.handlers.models.library import ProjectModels, open_models
from ovmstrio.isolation.codec import encode_error
from ovmstrio.isolation.generator_hosts import RAISED
from ovmstrio.isolation.hosted import Hosted, Invocation
from ovmstrio.isolation.process_exit import LOST_CHANNEL
from ovmstrio.isolation.user_code import UserCodeRaisedError, is_async

if TYPE_CHECKING:
    from ovmstrio.handlers.grpc.services import Rpc, UserProto

__all__ = [
    "CANCEL",
    "ENDED",
    "HEADERS",
    "LOG",
    "RAISED",
    "REPLY",
    "STATUS",
    "TAKEN",
    "TRAILERS",
    "Events",
    "HostedRpcs",
    "ToldCode",
    "host_handler",
]

# ----------------------------------------------------------------------
# A handler in a worker process: the user's object, its threads and its models, on an event loop of their own
# ----------------------------------------------------------------------

_END_SECONDS: Final = 15.0
_LOOK_SECONDS: Final = 0.5

ThereT = TypeVar("ThereT")


class _CarriedCode(HandlerCode):
    """Leaves it to the server to log what the handler raises, and to say what becomes of it."""

    def failure(self, error: BaseException, step: str) -> Exception:
        """Carry what was raised to the border of the process."""
        del step
        return UserCodeRaisedError(starlette_error(error) or error)

    def wrong(self, step: str, problem: str) -> UserCodeError:
        """Make an error of what the handler gave that cannot be used."""
        del step
        return UserCodeError(HIDDEN, detail=problem)


class _BatchCode(_CarriedCode):
    """For errors among the results of a batch, which say themselves what their requests get."""

    def failure(self, error: BaseException, step: str) -> Exception:
        """Give an error for one request of several."""
        chosen = starlette_error(error) or error
        if not isinstance(chosen, HTTPError):
            self.report(error, step)
        return chosen if isinstance(chosen, Exception) else UserCodeError(HIDDEN)


class _OnLoop:
    """Calls from threads of the process to its loop, which can be cancelled together."""

    def __init__(self, loop: trio.lowlevel.TrioToken) -> None:
        self.loop = loop
        self._scope: trio.CancelScope | None = None
        self._is_stopped = False
        self._process = os.getpid()

    def run(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Run an async function there, and give what it gives.

        Raises:
            BaseException: what it raises; of code of users the error itself.
            InterruptedError: it was cancelled.
        """
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
                        # As in threads: the child of a fork has come back from code of users.
                        os._exit(0)
        raise InterruptedError("cancelled")

    def stop(self) -> None:
        """Cancel what runs, and whatever would be run later; from any thread."""
        self._is_stopped = True
        self.loop.run_sync_soon(self._cancel)

    def _cancel(self) -> None:
        if self._scope is not None:
            self._scope.cancel()


class HostedHandler:
    """See :class:`Hosted`.

    Args:
        file: the project's.
        mounted_as: the name that it is served by beside others, empty if it is served alone.
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
        self._code: HandlerCode = _BatchCode("", Path())
        self._after: dict[int, tuple[Callback, ...]] = {}
        self._numbers = itertools.count(1)

    def invoke(self, method: str, value: Any) -> Invocation:
        """Say what is to be called for a request of the server's."""
        match method:
            case "make":
                return Invocation(self._make)
            case "finalize":
                return Invocation(self._finalize)
            case "info":
                return Invocation(self._opened_models.info)
        on_loop = _OnLoop(self._token)
        functions: dict[str, Callable[..., Any]] = {"batch": self._batch, "rpc": self._call}
        function = functions.get(method, self._answer)
        return Invocation(function, (on_loop, *value), convert_item=_itself, stop=on_loop.stop)

    def forget(self, value: Any) -> None:
        """Run the callbacks of an answer, as it has been sent; or give a call one of its requests."""
        if isinstance(value, list):
            number, data, is_broken = value
            self._token.run_sync_soon(partial(_there(self._rpcs).give, number, data, is_broken=is_broken))
            return
        callbacks = self._after.pop(value, ())
        self._token.run_sync_soon(self._loaded.run_after, callbacks)

    # Life

    def _make(self) -> list[Any]:
        """Load the handler, and tell of its methods.

        Raises:
            ConfigError: it cannot be loaded.
        """
        threading.Thread(target=self._live, name="loop of the handler", daemon=True).start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure
        return [
            list(MethodRow(each.name, sorted(each.wanted), each.is_generator, each.is_batched, is_async(each.call)))
            for each in self._loaded.methods.values()
        ]

    def _live(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as error:  # noqa: BLE001 - the border of user code
            if self._loop is not None:
                # Whoever waits for this loop would wait for ever.
                os._exit(LOST_CHANNEL)
            self._failure = _first_of(error)
        finally:
            self._ended.set()
            self._ready.set()

    async def _serve(self) -> None:
        project, _ = read_project(self._file, mounted_as=self._mounted_as)
        _enter(project)
        _watch_descriptors(self._ended)
        self._closing = trio.Event()
        async with self._opened(project):
            self._loop = trio.lowlevel.current_trio_token()
            self._ready.set()
            await self._closing.wait()

    @asynccontextmanager
    async def _opened(self, project: ProjectSpec) -> AsyncIterator[None]:
        if project.protobuf_path is not None:
            async with self._opened_rpcs(project):
                yield
            return
        code = _CarriedCode(project.name, project.directory)
        self._code = _BatchCode(project.name, project.directory)
        async with (
            open_models(project) as self._models,
            open_handler(
                project, Supplies(self._models.clients), code=code, is_alone=True, gathers=False
            ) as self._handler,
        ):
            yield

    @asynccontextmanager
    async def _opened_rpcs(self, project: ProjectSpec) -> AsyncIterator[None]:
        # Those that are called over HTTP know nothing of gRPC.
        from ovmstrio.handlers.grpc.call_run import PASSING  # noqa: PLC0415 - as said
        from ovmstrio.handlers.grpc.project import open_rpc_handler, proto_of  # noqa: PLC0415 - as said

        code = ToldCode(project.name, project.directory, PASSING)
        async with (
            open_models(project) as self._models,
            proto_of(project) as proto,
            open_rpc_handler(project, proto, clients=self._models.clients, is_alone=True, code=code) as self._handler,
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
        return _there(self._loop)

    @property
    def _loaded(self) -> LoadedHandler:
        return _there(self._handler)

    @property
    def _opened_models(self) -> ProjectModels:
        return _there(self._models)

    # Requests

    def _answer(self, on_loop: _OnLoop, name: str, row: list[Any], request_id: str) -> Any:
        """Give an answer: ``[head, body]``, or a generator of its head and the pieces of its body."""
        try:
            answer: HttpAnswer = on_loop.run(self._answered, name, row, request_id)
        except (MalformedPayload, HTTPError) as error:
            return refusal_row(error)
        return self._told(answer, on_loop)

    def _told(self, answer: HttpAnswer, on_loop: _OnLoop) -> Any:
        head = answer_head(answer, self._keep(answer.after))
        stream = answer.stream
        return [ANSWER, head, answer.content] if stream is None else _pieces(head, stream, on_loop)

    async def _answered(self, name: str, row: list[Any], request_id: str) -> HttpAnswer:
        with in_log(request_id):
            arguments = await http_arguments(self._loaded.methods[name].wanted, read_request(row))
            result = await self._loaded.call(name, **arguments)
            return await to_answer(result, self._loaded, name)

    def _call(self, on_loop: _OnLoop, number: int, told: list[Any], first: bytes | None) -> Iterator[Any]:
        """Give what a call over gRPC tells, event by event."""
        events: Events = on_loop.run(_there(self._rpcs).start, number, told, first)
        return _told_events(events, on_loop)

    def _batch(self, on_loop: _OnLoop, name: str, rows: list[list[Any]]) -> list[Any]:
        """Give an answer, or an error, for each of several requests of one batch."""
        told: list[Any] = on_loop.run(self._answered_batch, name, rows)
        return told

    async def _answered_batch(self, name: str, rows: list[list[Any]]) -> list[Any]:
        told: dict[int, Any] = {}
        items: dict[int, BatchItem] = {}
        method = self._loaded.methods[name]
        for position, (row, request_id) in enumerate(rows):
            try:
                items[position] = BatchItem(await http_arguments(method.wanted, read_request(row)), request_id)
            except MalformedPayload as error:
                told[position] = refusal_row(error)
        if items:
            run = BatchedMethod(method, lambda method, given: self._loaded.call(method.name, **given), self._code)
            results = await run.run(list(items.values()))
            for position, result in zip(items, results, strict=True):
                told[position] = await self._told_of_batch(name, result)
        return [told[position] for position in range(len(rows))]

    async def _told_of_batch(self, name: str, result: Any) -> list[Any]:
        if isinstance(result, Exception):
            return refusal_row(result) if isinstance(result, HTTPError) else [RAISED, encode_error(result)]
        try:
            answer = await to_answer(result, self._loaded, name)
            stream = answer.stream
            body = answer.content if stream is None else b"".join([piece async for piece in stream])
        except UserCodeRaisedError as raised:
            return [RAISED, encode_error(raised.error)]
        except Exception as error:  # noqa: BLE001 - told to the server
            return [RAISED, encode_error(error)]
        return [ANSWER, answer_head(answer, self._keep(answer.after)), body]

    def _keep(self, callbacks: tuple[Callback, ...]) -> int:
        if not callbacks:
            return 0
        number = next(self._numbers)
        self._after[number] = callbacks
        return number


def _pieces(head: list[Any], body: ByteStream, on_loop: _OnLoop) -> Iterator[Any]:
    """Give the head of an answer, and its body piece by piece."""
    try:
        yield head
        while True:
            try:
                yield on_loop.run(anext, body)
            except StopAsyncIteration:
                return
    finally:
        # What was cancelled has an end, too.
        _OnLoop(on_loop.loop).run(body.aclose)


def _told_events(events: Events, on_loop: _OnLoop) -> Iterator[Any]:
    try:
        while (event := on_loop.run(events.take)) is not None:
            yield event
    finally:
        _OnLoop(on_loop.loop).run(events.aclose)


def _itself(value: Any) -> Any:
    return value


def _there(found: ThereT | None) -> ThereT:
    """Give what is there once the handler has been made.

    Raises:
        RuntimeError: it has not been.
    """
    if found is None:
        raise RuntimeError("the handler has not been made")
    return found


def _enter(project: ProjectSpec) -> None:
    """Make the process what a project finds that is served alone: its folder, its environment, its form of the log."""
    os.environ.update(project.environment)
    os.chdir(project.directory)
    logging.basicConfig(level=project.log_level.upper(), handlers=[StdoutHandler()], force=True)
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.stdlib.render_to_log_kwargs],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLogger().level),
        logger_factory=structlog.stdlib.LoggerFactory(),
    )


def _watch_descriptors(ended: threading.Event) -> None:
    """End the process once code of users has closed what does not belong to it: nobody could be told any other way."""
    sentinel, _ = os.pipe()

    def watch() -> None:
        while not ended.wait(_LOOK_SECONDS):
            try:
                os.fstat(sentinel)
            except OSError:
                os._exit(LOST_CHANNEL)

    threading.Thread(target=watch, name="watcher of descriptors", daemon=True).start()


def _first_of(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def host_handler(argument: Any) -> Hosted:
    """Host the handler of a project, told as its file and the name that it is mounted as."""
    file, mounted_as = argument
    return HostedHandler(file, mounted_as)


# ----------------------------------------------------------------------
# Calls of a handler's gRPC services in a worker process: what comes and goes by way of the server, as plain data
# ----------------------------------------------------------------------

HEADERS: Final = "headers"
REPLY: Final = "reply"
TRAILERS: Final = "trailers"
TAKEN: Final = "taken"
CANCEL: Final = "cancel"
LOG: Final = "log"
STATUS: Final = "status"
ENDED: Final = "ended"

_AHEAD: Final = 8
"""Events that may wait for whoever takes them to the server."""

_logged: Final[ContextVar[Callable[[BaseException, str], None] | None]] = ContextVar("who logs", default=None)


class ToldCode(HandlerCode):
    """Has the server log what the handler raises in a call."""

    def report(self, error: BaseException, step: str) -> None:
        """Tell of an error, in the call that it is of; elsewhere it is logged here."""
        tell = _logged.get()
        if tell is None:
            super().report(error, step)
        else:
            tell(error, step)


@dataclass(frozen=True, slots=True)
class _Metadata:
    pairs: list[tuple[str, str | bytes]]

    def items(self) -> Iterable[tuple[str, str | bytes]]:
        """Give all pairs in their order."""
        return self.pairs


class _RemoteCall:
    """See :class:`RpcCall`.

    Args:
        rpc: what is called.
        told: path, metadata, user agent, endpoint of the client, and the seconds until the deadline or None.
        emit: takes an event to the server.
        requests: gives what the server has of the client's messages, None after the last.
    """

    def __init__(
        self,
        rpc: Rpc,
        told: list[Any],
        emit: Callable[[list[Any]], Awaitable[None]],
        requests: trio.MemoryReceiveChannel[bytes | None],
        cancel: Callable[[], None],
    ) -> None:
        self.path, pairs, self.user_agent, self.client_endpoint, seconds = told
        self.metadata = _Metadata([(key, value) for key, value in pairs])
        self.deadline = math.inf if seconds is None else trio.current_time() + seconds
        self._rpc = rpc
        self._emit = emit
        self._requests = requests
        self._cancel = cancel

    def cancel(self) -> None:
        """End the call."""
        self._cancel()

    async def recv_message(self) -> Any:
        """Give the next request, None after the last.

        Raises:
            StreamTerminatedError: no more can be read.

        Cancellation: while there is none.
        """
        try:
            data = await self._requests.receive()
        except trio.EndOfChannel:
            raise StreamTerminatedError("no more requests can be read") from None
        await self._emit([TAKEN])
        return None if data is None else self._rpc.request_class.FromString(data)

    async def send_initial_metadata(self, *, metadata: Any = None) -> None:
        """Send headers."""
        await self._emit([HEADERS, [list(pair) for pair in metadata or ()]])

    async def send_message(self, message: bytes) -> None:
        """Send a reply."""
        await self._emit([REPLY, message])

    async def send_trailing_metadata(self, *, status_message: str | None = None, metadata: Any = None) -> None:
        """Say what goes with the end."""
        await self._emit([TRAILERS, status_message, [list(pair) for pair in metadata or ()]])


class Events:
    """What a call tells the server, one after the other; closing it cancels the call.

    Args:
        scope: of the call.
        received: gives events.
    """

    def __init__(self, scope: trio.CancelScope, received: trio.MemoryReceiveChannel[list[Any]]) -> None:
        self._scope = scope
        self._received = received

    async def take(self) -> list[Any] | None:
        """Give the next event, None after the last.

        Cancellation: while there is none.
        """
        try:
            return await self._received.receive()
        except trio.EndOfChannel:
            return None

    async def aclose(self) -> None:
        """End the call."""
        self._scope.cancel()
        await trio.lowlevel.checkpoint()


class HostedRpcs:
    """The services of a handler.

    Args:
        proto: their messages.
        handler: has a method for each RPC.
        tasks: hosts calls.
    """

    def __init__(self, proto: UserProto, handler: LoadedHandler, tasks: trio.Nursery) -> None:
        self._rpcs = {rpc.path: rpc for rpc in proto.rpcs}
        self._handler = handler
        self._tasks = tasks
        self._requests: dict[int, trio.MemorySendChannel[bytes | None]] = {}

    async def start(self, number: int, told: list[Any], first: bytes | None) -> Events:
        """Begin a call; whoever gets its events closes them.

        Args:
            number: of the call, by which its requests come.
            told: what the server says of it.
            first: its request; None if it has a stream of them.
        """
        # The server gives no more than it has credit for.
        give, take = trio.open_memory_channel[bytes | None](math.inf)
        emit, received = trio.open_memory_channel[list[Any]](_AHEAD)
        if first is not None:
            give.send_nowait(first)
            give.send_nowait(None)
        else:
            self._requests[number] = give
        scope = trio.CancelScope()

        def cancel() -> None:
            self._tasks.start_soon(emit.send, [CANCEL])

        rpc = self._rpcs[told[0]]
        call = _RemoteCall(rpc, told, emit.send, take, cancel)
        self._tasks.start_soon(partial(self._run, rpc, call, scope, emit, number))
        await trio.lowlevel.checkpoint()
        return Events(scope, received)

    def give(self, number: int, data: bytes | None, *, is_broken: bool) -> None:
        """Give a call a request, None after the last; ``is_broken`` if no more can be read."""
        channel = self._requests.get(number)
        if channel is None:
            return
        if not is_broken:
            channel.send_nowait(data)
        if is_broken or data is None:
            self._requests.pop(number).close()

    async def _run(
        self, rpc: Rpc, call: _RemoteCall, scope: trio.CancelScope, emit: trio.MemorySendChannel[list[Any]], number: int
    ) -> None:
        errors: list[list[Any]] = []
        _logged.set(lambda error, step: errors.append([LOG, step, encode_error(error)]))
        with scope, emit:
            end = await self._end(rpc, call)
            for event in (*errors, end):
                await emit.send(event)
        self._requests.pop(number, None)

    async def _end(self, rpc: Rpc, call: _RemoteCall) -> list[Any]:
        try:
            await CallRun(rpc, call, self._handler).run()
        except GRPCError as error:
            cause = error.__cause__
            told = None if cause is None else encode_error(cause)
            return [STATUS, Status(error.status).value, error.message, error.details, told]
        except StreamTerminatedError:
            return [STATUS, Status.CANCELLED.value, "the call is over", None, None]
        except Exception as error:  # noqa: BLE001 - told to the server
            return [RAISED, encode_error(error)]
        return [ENDED]
