"""A handler that is loaded: its methods, and how they are called."""

from __future__ import annotations

import contextvars
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, Self, TypeVar

from ovmstrio.core.http import Callback, HttpAnswer, HttpRequest
from ovmstrio.handlers.batches import Arguments, BatchItem, Patience, current_request_id
from ovmstrio.handlers.callbacks import Callbacks, call_handler_code
from ovmstrio.handlers.handler_class import HandlerMethod
from ovmstrio.handlers.handler_code import HandlerCode
from ovmstrio.handlers.http_results import to_answer
from ovmstrio.handlers.http_values import http_arguments
from ovmstrio.handlers.models.model_cache import lease_models
from ovmstrio.isolation.generators import AsyncPump, End, Failed, ThreadPump
from ovmstrio.isolation.thread_pool import WorkerThreads
from ovmstrio.isolation.user_code import UserCodeRaisedError, call_in_thread
from ovmstrio.serving.batching import Batcher
from ovmstrio.util.stdio import running_code_of

if TYPE_CHECKING:
    from ovmstrio.handlers.grpc.rpc_call import RpcCall
    from ovmstrio.handlers.grpc.services import Rpc

__all__ = ["HttpHandler", "LoadedHandler"]

# ----------------------------------------------------------------------
# A handler that is loaded: its methods, and how they are called
# ----------------------------------------------------------------------

_T = TypeVar("_T")
_UNTIL_THE_END: Final = Patience()


class LoadedHandler:
    """An object of the user's class ``Handler``, whose methods requests reach.

    Args:
        instance: the object.
        methods: by name.
        threads: where plain methods run.
        callbacks: where what comes after an answer runs.
        code: whose code it is.
        batcher: joins the calls of the method that is batched.
        patience: for how long calls wait.
    """

    def __init__(
        self,
        instance: Any,
        methods: Mapping[str, HandlerMethod],
        threads: WorkerThreads,
        callbacks: Callbacks,
        *,
        code: HandlerCode,
        batcher: Batcher[BatchItem, Any] | None = None,
        patience: Patience = _UNTIL_THE_END,
    ) -> None:
        self.instance = instance
        self.methods = methods
        self._threads = threads
        self._callbacks = callbacks
        self._code = code
        self._batcher = batcher
        self._patience = patience

    @property
    def obstacle(self) -> str:
        """Nothing ever: its threads are there as long as the server is."""
        return ""

    async def answer(self, name: str, request: HttpRequest) -> HttpAnswer:
        """Have a method answer a request.

        Raises:
            MalformedPayload: the body is not what its content type says.
            Exception: as :meth:`call`, and :func:`to_answer`.

        Ownership: a stream in the answer is the caller's to close.

        Cancellation: as :meth:`call`.
        """
        result = await self.call(name, **await http_arguments(self.methods[name].wanted, request))
        return await to_answer(result, self, name)

    async def answer_rpc(self, rpc: Rpc, call: RpcCall) -> None:
        """Answer a call over gRPC; see :class:`RpcHandler`."""
        # Those that are called over HTTP know nothing of gRPC.
        from ovmstrio.handlers.grpc.call_run import CallRun  # noqa: PLC0415 - as said

        await CallRun(rpc, call, self).run()

    async def call(self, name: str, /, **arguments: Any) -> Any:
        """Call a method and give what it returns; a generator has not begun then.

        Args:
            name: of the method.
            arguments: at least those that it wants; others are ignored.

        Raises:
            UserCodeError: it raised, which has been logged.
            HTTPError: it raised this, or Starlette's ``HTTPException``.
            ServerError: it raised this.
            QueueTimeout: it waited too long for a thread.
            KeyError: there is no such method.

        Cancellation: while it waits for a thread or a batch, it is not called; once a plain method runs it keeps its
        thread until it ends, and its result is dropped; an ``async def`` one is cancelled where it waits.
        """
        method = self.methods[name]
        given = {each: arguments[each] for each in method.wanted}
        if method.is_batched and self._batcher is not None:
            item = BatchItem(given, current_request_id())
            return await self._batcher.submit(item, start_within=self._patience.batch)
        if method.is_generator:
            return method.call(**given)
        return await invoke(self._threads, self._code, method, given, self._patience.thread)

    async def iterate(self, name: str, convert: Callable[[Any], _T], /, **arguments: Any) -> UserStream[_T]:
        """Call a method that gives many values: a generator, an iterator, or anything that can be iterated.

        The caller must close the stream.

        Args:
            name: of the method.
            convert: makes of a value what the stream gives, as for :meth:`stream`.
            arguments: as for :meth:`call`.

        Raises:
            UserCodeError: it raised, or gave something that cannot be iterated; this has been logged.
            Exception: as :meth:`call`.

        Cancellation: as :meth:`call`.
        """
        result = await self.call(name, **arguments)
        if not isinstance(result, Iterator | AsyncIterator):
            try:
                result = aiter(result) if hasattr(result, "__aiter__") else iter(result)
            except TypeError:
                found = f"expected something to iterate over, found a {type(result).__name__}"
                raise self._code.wrong(name, found) from None
        return self.stream(result, convert, name)

    def stream(
        self, values: Iterator[Any] | AsyncIterator[Any], convert: Callable[[Any], _T], step: str
    ) -> UserStream[_T]:
        """Run an iterator of the user's where it belongs; whoever gets the stream must close it.

        Args:
            values: the iterator.
            convert: makes of a value what the stream gives; what it raises counts as the iterator's.
            step: the method that it comes from, for the log.
        """
        return UserStream(values, convert, self._threads, self._code, step)

    def failure(self, error: BaseException, step: str) -> Exception:
        """Log what user code is to blame for, and make of it what is raised instead."""
        return self._code.failure(error, step)

    async def run_in_thread(self, function: Callable[..., _T], *args: Any) -> _T:
        """Call a plain function in a thread of the handler's.

        Raises:
            BaseException: what it raises.

        Cancellation: as a plain method's.
        """
        try:
            result: _T = await call_in_thread(self._threads, function, *args)
        except UserCodeRaisedError as raised:
            raise raised.error from None
        return result

    def run_after(self, callbacks: Iterable[Callback]) -> None:
        """Run the callbacks of an answer that has been sent, in the background and on no thread of requests."""
        self._callbacks.start(callbacks)


async def invoke(
    threads: WorkerThreads,
    code: HandlerCode,
    method: HandlerMethod,
    given: Arguments,
    start_within: float = math.inf,
) -> Any:
    """Call a method with its arguments.

    Raises:
        QueueTimeout: it waited for a thread for ``start_within`` seconds.
        UserCodeError: it raised, which has been logged.
        Exception: it raised an error that passes.

    Cancellation: as :func:`call_handler_code`.
    """
    try:
        return await call_handler_code(threads, method.call, given, start_within=start_within)
    except UserCodeRaisedError as raised:
        raise code.failure(raised.error, method.name) from None


class UserStream(Generic[_T]):
    """The values of an iterator of the user's, plain ones in worker threads and async ones on the event loop.

    A plain iterator runs a bounded number of values ahead, holds a thread only while it makes values, and keeps the
    models that it asked for until the stream is over.

    Args:
        values: the iterator.
        convert: makes of a value what is given out, where the value was made.
        threads: of the handler.
        code: whose code it is.
        step: the method that the iterator comes from.
    """

    def __init__(
        self,
        values: Iterator[Any] | AsyncIterator[Any],
        convert: Callable[[Any], _T],
        threads: WorkerThreads,
        code: HandlerCode,
        step: str,
    ) -> None:
        self._context = contextvars.copy_context()
        self._leases = lease_models()
        self._context.run(self._leases.__enter__)
        self._pump: ThreadPump[_T] | AsyncPump[_T]
        if isinstance(values, AsyncIterator):
            self._pump = AsyncPump(values, convert, threads.grace_seconds, partial(running_code_of, code.names))
        else:
            self._pump = ThreadPump(values, convert, threads, self._context)
        self._code = code
        self._step = step
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _T:
        """Give the next value.

        Raises:
            StopAsyncIteration: that was all.
            UserCodeError: the iterator raised; it has been logged.
            Exception: the iterator raised an error that passes.

        Cancellation: while none is ready.
        """
        if self._is_over:
            raise StopAsyncIteration
        item = await self._pump.pull()
        if isinstance(item, End):
            self._end()
            raise StopAsyncIteration
        if isinstance(item, Failed):
            self._end()
            raise self._code.failure(item.error, self._step) from None
        return item

    async def aclose(self) -> None:
        """Close the iterator: a plain one when the step that it is in has ended, without waiting for that.

        Cancellation: shielded; closing an async iterator is waited for, for the threads' grace.
        """
        if self._is_over:
            return
        self._end()
        if isinstance(self._pump, ThreadPump):
            self._pump.leave()
            return
        error = await self._pump.aclose()
        if error is not None:
            self._code.report(error, self._step)

    def _end(self) -> None:
        self._is_over = True
        self._context.run(self._leases.__exit__, None, None, None)


# ----------------------------------------------------------------------
# A handler that is called over HTTP, wherever its code runs
# ----------------------------------------------------------------------


class HttpHandler(Protocol):
    """What the paths of a handler need of it."""

    @property
    def methods(self) -> Mapping[str, HandlerMethod]:
        """Its methods by name."""
        ...

    @property
    def obstacle(self) -> str:
        """Why it cannot be called now, empty if it can."""
        ...

    async def answer(self, name: str, request: HttpRequest) -> HttpAnswer:
        """Have a method answer a request.

        Raises:
            MalformedPayload: the body is not what its content type says.
            UserCodeError: the method raised, which has been logged, or its process ended.
            HTTPError: it raised this, or Starlette's ``HTTPException``.
            ServerError: it raised this, or cannot be called now.

        Ownership: a stream in the answer is the caller's to close.

        Cancellation: while it waits, it is not called; a plain method that runs goes on, and its result is dropped; an
        ``async def`` one is cancelled where it waits.
        """
        ...

    def run_after(self, callbacks: Iterable[Callback]) -> None:
        """Run the callbacks of an answer that has been sent, in the background."""
        ...
