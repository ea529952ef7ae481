"""A handler whose code runs in worker processes, as the server has it."""

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
from ovmstrio.core.http import Callback, HttpAnswer, HttpRequest
from ovmstrio.handlers.batches import Patience, current_request_id
from ovmstrio.handlers.building import drain_batcher, start_batcher
from ovmstrio.handlers.callbacks import DRAIN_SECONDS
from ovmstrio.handlers.config.project_spec import ProjectSpec
from ovmstrio.handlers.handler_class import HandlerMethod
from ovmstrio.handlers.handler_code import HandlerCode
from ovmstrio.handlers.isolated import hosted_handler as events
from ovmstrio.handlers.isolated.messages import AnswerHead, MethodRow, read_refusal, request_row
from ovmstrio.isolation.codec import decode_error
from ovmstrio.isolation.generator_hosts import RAISED
from ovmstrio.isolation.generators import End, Failed
from ovmstrio.isolation.isolated_code import CodeWorker, IsolatedCode, Isolation, RemoteGenerator
from ovmstrio.isolation.user_code import UserCodeRaisedError
from ovmstrio.isolation.worker_process import WorkerEnded
from ovmstrio.serving.batching import Batcher

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.handlers.grpc.rpc_call import RpcCall
    from ovmstrio.handlers.grpc.services import Rpc

__all__ = ["IsolatedHandler", "IsolatedModels", "RemoteRpc", "call_row", "open_isolated_handler"]

# ----------------------------------------------------------------------
# A handler whose code runs in worker processes, as the server has it
# ----------------------------------------------------------------------

_UNTIL_THE_END: Final = Patience()
_HOSTED: Final = "ovmstrio.handlers.isolated.hosted_handler:host_handler"


@dataclass(frozen=True, slots=True, eq=False)
class _BatchedRequest:
    """The part that one request has in a batch."""

    row: list[Any]
    request_id: str


@asynccontextmanager
async def _taken(places: trio.Semaphore, within: float) -> AsyncIterator[None]:
    """Hold a place in a process.

    Raises:
        QueueTimeout: none became free in time.
    """
    with trio.move_on_after(within) as scope:
        await places.acquire()
    if scope.cancelled_caught:
        raise QueueTimeout(within)
    try:
        yield
    finally:
        places.release()


class IsolatedHandler:
    """See :class:`HttpHandler`; the object is in each process.

    Args:
        project: whose handler.
        isolation: how many processes, and their limits.
        mounted_as: the name that it is served by beside others, empty if it is served alone.
        patience: for how long calls wait.
    """

    def __init__(
        self, project: ProjectSpec, isolation: Isolation, mounted_as: str, patience: Patience = _UNTIL_THE_END
    ) -> None:
        self.methods: Mapping[str, HandlerMethod] = {}
        self._project = project
        self._code = HandlerCode(project.name, project.directory)
        self._async: frozenset[str] = frozenset()
        self._batcher: Batcher[_BatchedRequest, Any] | None = None
        argument = [str(project.file), mounted_as]
        self.processes = IsolatedCode(isolation, _HOSTED, argument, prepare=self._prepare, names=self._code.names)
        # A call that waits for a storage lends its place in the process, where all others have to be then.
        is_lending = project.models is not None and project.models.is_cached
        count = project.threads_per_process * isolation.processes
        self._patience = patience
        self._places: trio.Semaphore | None = None if is_lending else trio.Semaphore(count)

    # Life

    async def _prepare(self, worker: CodeWorker) -> None:
        """Make the object of one process.

        Raises:
            UserCodeRaisedError: it cannot be made.
            WorkerEnded: the process ended.

        Cancellation: at once.
        """
        rows = [MethodRow(*row) for row in await worker.call("make", None, is_limited=False)]
        self._async = frozenset(row.name for row in rows if row.is_async)
        self.methods = {
            row.name: HandlerMethod(row.name, _elsewhere, frozenset(row.wanted), row.is_generator, row.is_batched)
            for row in rows
        }

    async def gather(self, nursery: trio.Nursery, hooks: BatchHooks, processes: int) -> Batcher[Any, Any] | None:
        """Start to gather the requests of the method that is batched, if there is one."""
        batching = self._project.batching
        name = next((each.name for each in self.methods.values() if each.is_batched), None)
        if batching is None or name is None:
            return None
        concurrency = self._project.threads_per_process * processes
        run = partial(self._run_batch, name)
        self._batcher = await start_batcher(nursery, batching, run, concurrency=concurrency, hooks=hooks)
        return self._batcher

    async def finalize(self, worker: CodeWorker) -> None:
        """Have a process close its handler, as far as it can in time.

        Cancellation: shielded, for it is bounded.
        """
        with trio.move_on_after(DRAIN_SECONDS, shield=True):
            with suppress(UserCodeRaisedError, WorkerEnded):
                await worker.call("finalize", None, is_limited=False)

    @property
    def obstacle(self) -> str:
        """Why it cannot be called now, empty if it can: no process is left."""
        return "" if self.processes.pids else "its worker processes have ended, and none has been started again yet"

    # Calls

    async def answer(self, name: str, request: HttpRequest) -> HttpAnswer:
        """Have a method answer a request; see :class:`HttpHandler`."""
        row, request_id = request_row(request), current_request_id()
        if self.methods[name].is_batched and self._batcher is not None:
            item = _BatchedRequest(row, request_id)
            answer: HttpAnswer = await self._batcher.submit(item, start_within=self._patience.batch)
            return answer
        async with self._place(name):
            worker, told = await self._call("answer", name, [name, row, request_id])
            if isinstance(told, RemoteGenerator):
                return await self._begun(name, worker, told)
        refusal = read_refusal(told)
        if refusal is not None:
            raise refusal
        return _whole(worker, told)

    async def answer_rpc(self, rpc: Rpc, call: RpcCall) -> None:
        """Answer a call over gRPC; see :class:`RpcHandler`."""
        # Those that are called over HTTP know nothing of gRPC.

        remote = RemoteRpc(rpc, call, self._code)
        first = await remote.first()
        # A stream has a thread only for as long as its steps take, of which the process alone knows.
        async with nullcontext() if rpc.server_streaming else self._place(rpc.name):
            worker, told = await self._call("rpc", rpc.name, first)
            await remote.run(worker, told)

    def _place(self, name: str) -> AbstractAsyncContextManager[Any]:
        if self._places is None or name in self._async:
            return nullcontext()
        return _taken(self._places, self._patience.thread)

    async def _call(self, method: str, name: str, value: Any) -> tuple[CodeWorker, Any]:
        try:
            return await self.processes.call(method, value)
        except UserCodeRaisedError as raised:
            raise self._failure(raised.error, name) from None
        except WorkerEnded as end:
            raise _worker_error(end) from None

    def _failure(self, error: BaseException, name: str) -> Exception:
        if isinstance(error, UserCodeError) and error.detail:
            return self._code.wrong(name, error.detail)
        return self._code.failure(error, name)

    async def _begun(self, name: str, worker: CodeWorker, pieces: RemoteGenerator) -> HttpAnswer:
        """Give an answer whose body comes in pieces.

        Raises:
            Exception: the method raised before its first piece.

        Cancellation: the generator is closed.
        """
        stream = _Pieces(pieces, partial(self._failure, name=name))
        try:
            head = await anext(stream)
        except BaseException:
            await stream.aclose()
            raise
        return AnswerHead(*head).answer(stream, partial(_run_after, worker))

    def run_after(self, callbacks: Iterable[Callback]) -> None:
        """Have the process of an answer run its callbacks; see :class:`HttpHandler`."""
        for callback in callbacks:
            callback()

    # Batches

    async def _run_batch(self, name: str, items: Sequence[_BatchedRequest]) -> list[Any]:
        """Answer the requests of a batch, or give an error in place of an answer.

        Raises:
            Exception: the method raised, or its process ended.

        Cancellation: as :meth:`CodeWorker.call`.
        """
        worker, told = await self._call("batch", name, [name, [[item.row, item.request_id] for item in items]])
        return [self._outcome(name, worker, each) for each in told]

    def _outcome(self, name: str, worker: CodeWorker, told: list[Any]) -> HttpAnswer | Exception:
        if told[0] == RAISED:
            return self._failure(decode_error(told[1]), name)
        return read_refusal(told) or _whole(worker, told)

    # Models

    async def info(self) -> dict[str, Any]:
        """Tell of the models, as ``/info`` does.

        Raises:
            ServerError: no process can tell.

        Cancellation: at once.
        """
        _, told = await self._call("info", "/info", None)
        return dict(told)


class IsolatedModels:
    """The models of a handler, which its processes have.

    Args:
        handler: whose.
    """

    def __init__(self, handler: IsolatedHandler) -> None:
        self._handler = handler
        self._loop = trio.lowlevel.current_trio_token()

    def info(self) -> dict[str, Any]:
        """Tell of all models, as ``/info`` does; blocking, in a thread."""
        return trio.from_thread.run(self._handler.info, trio_token=self._loop)


class _Pieces:
    """See :class:`ByteStream`; what the generator of an answer gives."""

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
            raise _worker_error(error) if isinstance(error, WorkerEnded) else self._failure(error)
        return item

    async def aclose(self) -> None:
        if not self._is_over:
            self._is_over = True
            await self._pieces.aclose()


def _whole(worker: CodeWorker, told: list[Any]) -> HttpAnswer:
    """Give an answer that is no stream."""
    _, head, body = told
    return AnswerHead(*head).answer(body, partial(_run_after, worker))


def _worker_error(end: WorkerEnded) -> UserCodeError:
    return UserCodeError(f"the process that ran this call {end.why}")


def _run_after(worker: CodeWorker, number: int) -> None:
    worker.forget(number)


def _elsewhere(**_: Any) -> Any:
    raise RuntimeError("the method is in another process")


@asynccontextmanager
async def open_isolated_handler(
    project: ProjectSpec,
    isolation: Isolation,
    *,
    mounted_as: str,
    batch_hooks: BatchHooks = NULL_BATCH_HOOKS,
    queue_timeout: float = 0,
) -> AsyncIterator[IsolatedHandler]:
    """Run a project's handler in worker processes while the block lasts.

    Args:
        project: what to load.
        isolation: how many processes, and their limits.
        mounted_as: the name that it is served by beside others, empty if it is served alone.
        batch_hooks: are told of batches.
        queue_timeout: for how many seconds a call waits for a place in a process; 0 for any time.

    Raises:
        ConfigError: the handler cannot be loaded.
        ModelFailure: its process ended meanwhile.
        ExceptionGroup: of what the block raises.

    Ownership: the processes.

    Cancellation: while it loads, and at the end while batches and processes end.
    """
    _check(project, isolation)
    handler = IsolatedHandler(project, isolation, mounted_as, Patience.of(project, queue_timeout))
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        try:
            try:
                await nursery.start(handler.processes.run)
            except (UserCodeRaisedError, WorkerEnded) as error:
                failure = _load_failure(project, error)
            else:
                batcher = await handler.gather(nursery, batch_hooks, isolation.processes)
                yield handler
                await drain_batcher(batcher, nursery.cancel_scope)
        finally:
            await handler.processes.aclose(handler.finalize, DRAIN_SECONDS)
    if failure is not None:
        raise failure


def _check(project: ProjectSpec, isolation: Isolation) -> None:
    """See that a project can be served so.

    Raises:
        ConfigError: it cannot.
    """
    models = project.models
    if models is not None and models.is_cached and isolation.processes > 1:
        message = "models that are cached are for one process"
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


# ----------------------------------------------------------------------
# Calls of gRPC services whose handler is in a worker process, as the server has them
# ----------------------------------------------------------------------

_AHEAD: Final = 4
"""Requests that may wait in the process for a handler; behind them the client's window fills."""
_numbers: Final = itertools.count(1)


def call_row(call: RpcCall) -> list[Any]:
    """Give what a process is told of a call."""
    seconds = None if call.deadline == math.inf else call.deadline - trio.current_time()
    return [call.path, [list(pair) for pair in call.metadata.items()], call.user_agent, call.client_endpoint, seconds]


class RemoteRpc:
    """One call.

    Args:
        rpc: what is called.
        call: the client's.
        code: logs what the handler raises.
    """

    def __init__(self, rpc: Rpc, call: RpcCall, code: HandlerCode) -> None:
        self._rpc = rpc
        self._call = call
        self._code = code
        self._number = next(_numbers)
        self._credit = trio.Semaphore(_AHEAD)
        self._failure: Exception | None = None
        self._unreadable: GRPCError | None = None

    async def first(self) -> list[Any]:
        """Give what the call begins with in the process.

        Raises:
            GRPCError: its request cannot be read.

        Cancellation: while the client sends nothing.
        """
        first = None
        if not self._rpc.client_streaming:
            message = await self._call.recv_message()
            first = message.SerializeToString()
        return [self._number, call_row(self._call), first]

    async def run(self, worker: CodeWorker, told: RemoteGenerator) -> None:
        """Take requests there, and events here, to the end of the call.

        Raises:
            GRPCError: how the call ends, unless it ends well.
            ServerError: the handler met this.

        Cancellation: at once; the call is cancelled there.
        """
        try:
            async with trio.open_nursery() as nursery:
                if self._rpc.client_streaming:
                    nursery.start_soon(self._feed, worker)
                try:
                    await self._take_all(told)
                except Exception as error:  # noqa: BLE001 - raised below, outside of the nursery and its group
                    self._failure = error
                nursery.cancel_scope.cancel()
        finally:
            await told.aclose()
        if self._unreadable is not None:
            raise self._unreadable
        if self._failure is not None:
            raise self._failure

    async def _feed(self, worker: CodeWorker) -> None:
        """Give the process the client's requests, as it takes them."""
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

    async def _take_all(self, told: RemoteGenerator) -> None:
        while True:
            event = await told.pull()
            if isinstance(event, Failed):
                raise _rpc_error(event.error)
            if not isinstance(event, list) or await self._take(*event):
                return

    async def _take(self, kind: str, *told: Any) -> bool:
        """Do what an event says; True if it is the last.

        Raises:
            GRPCError: it is how the call ends.
            ServerError: it is what the handler met.
        """
        steps: dict[str, Callable[..., Any]] = {
            events.HEADERS: self._send_headers,
            events.REPLY: self._call.send_message,
            events.TRAILERS: self._send_trailers,
        }
        match kind:
            case events.TAKEN:
                self._credit.release()
            case events.CANCEL:
                self._call.cancel()
            case events.LOG:
                self._code.report(decode_error(told[1]), told[0])
            case events.STATUS | events.RAISED:
                raise _failure(*told)
            case events.ENDED:
                return True
            case _:
                await steps[kind](*told)
        return False

    async def _send_headers(self, pairs: list[Any]) -> None:
        await self._call.send_initial_metadata(metadata=[(key, value) for key, value in pairs])

    async def _send_trailers(self, message: str | None, pairs: list[Any]) -> None:
        metadata = [(key, value) for key, value in pairs]
        await self._call.send_trailing_metadata(status_message=message, metadata=metadata)


def _failure(told: Any, *more: Any) -> Exception:
    """Make the error that a call ends with."""
    if not more:
        error = decode_error(told)
        return error if isinstance(error, ServerError) else GRPCError(Status.INTERNAL, type(error).__name__)
    message, details, cause = more
    made = GRPCError(Status(told), message, details)
    made.__cause__ = None if cause is None else decode_error(cause)
    return made


def _rpc_error(error: BaseException) -> Exception:
    if isinstance(error, WorkerEnded):
        return GRPCError(Status.INTERNAL, f"the process that ran this call {error.why}")
    return error if isinstance(error, Exception) else GRPCError(Status.INTERNAL, type(error).__name__)
