"""Server side of handlers whose code runs in worker processes.

::

    server                                         worker process
    HandlerRoutes ── IsolatedHandler ── request ──> HostedHandler: event loop with the handler, its threads and models
                  <── response or its chunks ──────
"""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from ovmstrio.core.errors import ConfigError, ModelFailure, Problem, QueueTimeout, ServerError, UserCodeError
from ovmstrio.core.hooks import NULL_BATCH_HOOKS, BatchHooks
from ovmstrio.core.http_messages import AfterResponse, HttpAnswer, HttpRequest
from ovmstrio.handlers import hosted_handler as events
from ovmstrio.handlers.batches import QueueTimeouts, current_request_id
from ovmstrio.handlers.config.project_spec import ProjectSpec
from ovmstrio.handlers.error_reporter import ErrorReporter
from ovmstrio.handlers.handler_calls import DRAIN_SECONDS
from ovmstrio.handlers.handler_class import HandlerMethod
from ovmstrio.handlers.handler_loading import drain_batcher, start_batcher
from ovmstrio.handlers.hosted_handler import MethodRow, ResponseHead, decode_refusal, encode_request
from ovmstrio.isolation import code_host
from ovmstrio.isolation.generators import End, Failed
from ovmstrio.isolation.isolated_code import CodeWorker, IsolatedCode, Isolation, RemoteGenerator
from ovmstrio.isolation.messages import decode_error
from ovmstrio.isolation.user_code import UserCodeRaisedError
from ovmstrio.isolation.worker_process import WorkerExited
from ovmstrio.serving.batching import Batcher

if TYPE_CHECKING:
    from ovmstrio.handlers.grpc.call import RpcCall
    from ovmstrio.handlers.grpc.proto_compiler import Rpc

_NO_TIMEOUTS: Final = QueueTimeouts()
_HOSTED: Final = "ovmstrio.handlers.hosted_handler:host_handler"


@dataclass(frozen=True, slots=True, eq=False)
class _BatchedRequest:
    row: list[Any]
    request_id: str


@asynccontextmanager
async def _acquired(slots: trio.Semaphore, within: float) -> AsyncIterator[None]:
    with trio.move_on_after(within) as scope:
        await slots.acquire()
    if scope.cancelled_caught:
        raise QueueTimeout(within)
    try:
        yield
    finally:
        slots.release()


class IsolatedHandler:
    """:class:`HttpHandler` with one handler object in each worker process.

    ``mounted_as`` is the name of the handler among other services; empty if it is the only service.
    """

    def __init__(
        self, project: ProjectSpec, isolation: Isolation, mounted_as: str, timeouts: QueueTimeouts = _NO_TIMEOUTS
    ) -> None:
        self.methods: Mapping[str, HandlerMethod] = {}
        self._project = project
        self._code = ErrorReporter(project.name, project.directory)
        self._async: frozenset[str] = frozenset()
        self._batcher: Batcher[_BatchedRequest, Any] | None = None
        argument = [str(project.file), mounted_as]
        self.processes = IsolatedCode(isolation, _HOSTED, argument, prepare=self._prepare, names=self._code.log_fields)
        # No slots here for cached models: calls that wait for a storage release their thread in the process.
        releases_slots = project.models is not None and project.models.is_cached
        count = project.threads_per_process * isolation.processes
        self._timeouts = timeouts
        self._slots: trio.Semaphore | None = None if releases_slots else trio.Semaphore(count)

    # Lifecycle

    async def _prepare(self, worker: CodeWorker) -> None:
        rows = [MethodRow(*row) for row in await worker.call("make", None, has_time_limit=False)]
        self._async = frozenset(row.name for row in rows if row.is_async)
        self.methods = {
            each.name: HandlerMethod(
                each.name, _remote_method, frozenset(each.arguments), each.is_generator, each.is_batched
            )
            for each in rows
        }

    async def start_batching(
        self, nursery: trio.Nursery, hooks: BatchHooks, processes: int
    ) -> Batcher[Any, Any] | None:
        """Start batching for the method that the project batches, if any."""
        batching = self._project.batching
        name = next((each.name for each in self.methods.values() if each.is_batched), None)
        if batching is None or name is None:
            return None
        concurrency = self._project.threads_per_process * processes
        run = partial(self._run_batch, name)
        self._batcher = await start_batcher(nursery, batching, run, concurrency=concurrency, hooks=hooks)
        return self._batcher

    async def finalize(self, worker: CodeWorker) -> None:
        """Close the handler of a process, for at most ``DRAIN_SECONDS``; shielded from cancellation."""
        with trio.move_on_after(DRAIN_SECONDS, shield=True):
            with suppress(UserCodeRaisedError, WorkerExited):
                await worker.call("finalize", None, has_time_limit=False)

    @property
    def unready_reason(self) -> str:
        """Reason why calls fail now; empty unless no process is left."""
        return "" if self.processes.pids else "all worker processes exited; restart pending"

    # Calls

    async def answer(self, name: str, request: HttpRequest) -> HttpAnswer:
        """Answer a request; see :class:`HttpHandler`."""
        row, request_id = encode_request(request), current_request_id()
        if self.methods[name].is_batched and self._batcher is not None:
            item = _BatchedRequest(row, request_id)
            answer: HttpAnswer = await self._batcher.submit(item, start_within=self._timeouts.batch)
            return answer
        async with self._slot(name):
            worker, result = await self._call("answer", name, [name, row, request_id])
            if isinstance(result, RemoteGenerator):
                return await self._start_stream(name, worker, result)
        refusal = decode_refusal(result)
        if refusal is not None:
            raise refusal
        return _buffered_answer(worker, result)

    async def answer_rpc(self, rpc: Rpc, call: RpcCall) -> None:
        """Answer a call over gRPC; see :class:`RpcHandler`."""
        remote = RemoteRpc(rpc, call, self._code)
        start_message = await remote.start_message()
        # No slot for a stream: it holds a thread only during its steps.
        async with nullcontext() if rpc.server_streaming else self._slot(rpc.name):
            worker, result = await self._call("rpc", rpc.name, start_message)
            await remote.run(worker, result)

    def _slot(self, name: str) -> AbstractAsyncContextManager[Any]:
        if self._slots is None or name in self._async:
            return nullcontext()
        return _acquired(self._slots, self._timeouts.thread)

    async def _call(self, method: str, name: str, value: Any) -> tuple[CodeWorker, Any]:
        try:
            return await self.processes.call(method, value)
        except UserCodeRaisedError as raised:
            raise self._failure(raised.error, name) from None
        except WorkerExited as end:
            raise _worker_error(end) from None

    def _failure(self, error: BaseException, name: str) -> Exception:
        if isinstance(error, UserCodeError) and error.detail:
            return self._code.invalid_result(name, error.detail)
        return self._code.convert_error(error, name)

    async def _start_stream(self, name: str, worker: CodeWorker, pieces: RemoteGenerator) -> HttpAnswer:
        stream = _ChunkStream(pieces, partial(self._failure, name=name))
        try:
            head = await anext(stream)
        except BaseException:
            await stream.aclose()
            raise
        return ResponseHead(*head).answer(stream, worker.forget)

    def run_after(self, callbacks: Iterable[AfterResponse]) -> None:
        """Run the callbacks of a sent response in its process; see :class:`HttpHandler`."""
        for callback in callbacks:
            callback()

    # Batches

    async def _run_batch(self, name: str, items: Sequence[_BatchedRequest]) -> list[Any]:
        worker, result = await self._call("batch", name, [name, [[item.row, item.request_id] for item in items]])
        return [self._outcome(name, worker, each) for each in result]

    def _outcome(self, name: str, worker: CodeWorker, result: list[Any]) -> HttpAnswer | Exception:
        if result[0] == code_host.RAISED:
            return self._failure(decode_error(result[1]), name)
        return decode_refusal(result) or _buffered_answer(worker, result)

    # Models

    async def info(self) -> dict[str, Any]:
        """Return the model metadata for ``/info``; raise ServerError if no process can answer."""
        _, result = await self._call("info", "/info", None)
        return dict(result)


class IsolatedModels:
    """Models of an isolated handler."""

    def __init__(self, handler: IsolatedHandler) -> None:
        self._handler = handler
        self._loop = trio.lowlevel.current_trio_token()

    def info(self) -> dict[str, Any]:
        """Return the metadata of all models; blocking."""
        return trio.from_thread.run(self._handler.info, trio_token=self._loop)


class _ChunkStream:
    def __init__(self, pieces: RemoteGenerator, failure: Any) -> None:
        self._pieces = pieces
        self._failure = failure
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self._is_over:
            raise StopAsyncIteration
        item = await self._pieces.pull()
        if isinstance(item, End):
            self._is_over = True
            raise StopAsyncIteration
        if isinstance(item, Failed):
            self._is_over = True
            error = item.error
            raise _worker_error(error) if isinstance(error, WorkerExited) else self._failure(error)
        return item

    async def aclose(self) -> None:
        if not self._is_over:
            self._is_over = True
            await self._pieces.aclose()


def _buffered_answer(worker: CodeWorker, result: list[Any]) -> HttpAnswer:
    _, head, body = result
    return ResponseHead(*head).answer(body, worker.forget)


def _worker_error(end: WorkerExited) -> UserCodeError:
    return UserCodeError(f"the process that ran this call {end.why}")


def _remote_method(**_: Any) -> Any:
    raise RuntimeError("method runs in another process")


@asynccontextmanager
async def open_isolated_handler(
    project: ProjectSpec,
    isolation: Isolation,
    *,
    mounted_as: str,
    batch_hooks: BatchHooks = NULL_BATCH_HOOKS,
    queue_timeout: float = 0,
) -> AsyncIterator[IsolatedHandler]:
    """Run a project's handler in worker processes during the block.

    Calls wait ``queue_timeout`` seconds for a slot of a process, forever if 0.

    Raises:
        ConfigError: the handler cannot be loaded.
        ModelFailure: a process ended while loading.
    """
    _check_processes(project, isolation)
    handler = IsolatedHandler(project, isolation, mounted_as, QueueTimeouts.of(project, queue_timeout))
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        try:
            try:
                await nursery.start(handler.processes.run)
            except (UserCodeRaisedError, WorkerExited) as error:
                failure = _load_failure(project, error)
            else:
                batcher = await handler.start_batching(nursery, batch_hooks, isolation.processes)
                yield handler
                await drain_batcher(batcher, nursery.cancel_scope)
        finally:
            await handler.processes.aclose(handler.finalize, DRAIN_SECONDS)
    if failure is not None:
        raise failure


def _check_processes(project: ProjectSpec, isolation: Isolation) -> None:
    models = project.models
    if models is not None and models.is_cached and isolation.processes > 1:
        message = "cached models require a single process"
        place = f"{models.section}.cache_size"
        raise ConfigError([Problem(message, str(project.file), path=place, suggestion="set python_processes to 1")])


def _load_failure(project: ProjectSpec, error: Exception) -> Exception:
    if isinstance(error, UserCodeRaisedError):
        if isinstance(error.error, ConfigError):
            return error.error
        reason = f"{type(error.error).__name__}: {error}"
    else:
        reason = f"its process {error}"
    return ModelFailure(f"the handler {project.name!r} could not be loaded: {reason}")


# Calls over gRPC

_AHEAD: Final = 4
"""Maximum number of requests queued in the process; flow control stops the client beyond it."""
_call_numbers: Final = itertools.count(1)


def encode_call(call: RpcCall) -> list[Any]:
    """Encode the description of a call."""
    seconds = None if call.deadline == math.inf else call.deadline - trio.current_time()
    return [call.path, [list(pair) for pair in call.metadata.items()], call.user_agent, call.client_endpoint, seconds]


class RemoteRpc:
    """One call of an isolated handler."""

    def __init__(self, rpc: Rpc, call: RpcCall, code: ErrorReporter) -> None:
        self._rpc = rpc
        self._call = call
        self._code = code
        self._number = next(_call_numbers)
        self._credit = trio.Semaphore(_AHEAD)
        self._failure: Exception | None = None
        self._unreadable: GRPCError | None = None

    async def start_message(self) -> list[Any]:
        """Return the message that starts the call in the process; raise GRPCError if the request cannot be read."""
        start_message = None
        if not self._rpc.client_streaming:
            message = await self._call.recv_message()
            start_message = message.SerializeToString()
        return [self._number, encode_call(self._call), start_message]

    async def run(self, worker: CodeWorker, result: RemoteGenerator) -> None:
        """Forward requests to the process and its events to the client until the call ends.

        Raises GRPCError for a failed call, and ServerError if the handler raised it.
        """
        try:
            async with trio.open_nursery() as nursery:
                if self._rpc.client_streaming:
                    nursery.start_soon(self._feed, worker)
                try:
                    await self._process_events(result)
                except Exception as error:  # noqa: BLE001 - raised below, outside of the nursery and its group
                    self._failure = error
                nursery.cancel_scope.cancel()
        finally:
            await result.aclose()
        if self._unreadable is not None:
            raise self._unreadable
        if self._failure is not None:
            raise self._failure

    async def _feed(self, worker: CodeWorker) -> None:
        message: Any = self
        while message is not None:
            await self._credit.acquire()
            try:
                message = await self._call.recv_message()
            except (GRPCError, StreamTerminatedError) as error:
                self._unreadable = error if isinstance(error, GRPCError) else None
                worker.forget([self._number, None, True])
                return
            worker.forget([self._number, None if message is None else message.SerializeToString(), False])

    async def _process_events(self, result: RemoteGenerator) -> None:
        while True:
            event = await result.pull()
            if isinstance(event, Failed):
                raise _rpc_error(event.error)
            if not isinstance(event, list) or await self._process_event(*event):
                return

    async def _process_event(self, kind: str, *result: Any) -> bool:
        """Process an event; return True if it is the last."""
        match kind:
            case events.REPLY:
                await self._call.send_message(*result)
            case events.HEADERS:
                await self._call.send_initial_metadata(metadata=_pairs(result[0]))
            case events.TRAILERS:
                message, pairs = result
                await self._call.send_trailing_metadata(status_message=message, metadata=_pairs(pairs))
            case events.REQUEST_TAKEN:
                self._credit.release()
            case events.CANCEL:
                self._call.cancel()
            case events.LOG:
                self._code.report(decode_error(result[1]), result[0])
            case events.STATUS | code_host.RAISED:
                raise _failure(*result)
        return kind == events.ENDED


def _pairs(metadata: list[Any]) -> list[tuple[Any, Any]]:
    return [(key, value) for key, value in metadata]


def _failure(result: Any, *more: Any) -> Exception:
    if not more:
        error = decode_error(result)
        return error if isinstance(error, ServerError) else GRPCError(Status.INTERNAL, type(error).__name__)
    message, details, cause = more
    made = GRPCError(Status(result), message, details)
    made.__cause__ = None if cause is None else decode_error(cause)
    return made


def _rpc_error(error: BaseException) -> Exception:
    if isinstance(error, WorkerExited):
        return GRPCError(Status.INTERNAL, f"the process that ran this call {error.why}")
    return error if isinstance(error, Exception) else GRPCError(Status.INTERNAL, type(error).__name__)
