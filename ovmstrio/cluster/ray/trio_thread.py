"""A trio loop in a thread beside an asyncio one, and the one bridge between the two.

::

    asyncio ── call(function) ──> a task and a cancel scope ──> its result ──> asyncio
    trio ───── ask(function) ───> a task of asyncio ──────────> its result ──> trio

Whoever is cancelled on one side has what it waits for cancelled on the other.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar

import structlog
import trio

from ovmstrio.core.errors import NotReady
from ovmstrio.wire.grpc.replies import single_error

__all__ = ["TrioProgram", "TrioThread"]

log = structlog.get_logger(__name__)

_T = TypeVar("_T")

_ENDED: Final = "the replica has ended"


class TrioProgram(Protocol):
    """What runs on the trio side beside the calls."""

    async def __call__(self, until: Callable[[], Awaitable[None]], *, task_status: trio.TaskStatus[Any]) -> None:
        """Run until ``until`` returns and it has come to an end of its own; calls are taken once it has started."""
        ...


class TrioThread:
    """The loop of trio, as the asyncio side sees it; made on a running asyncio loop.

    Ownership: the thread, which :meth:`aclose` ends, and every call in it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._ending: trio.Event | None = None
        self._thread: threading.Thread | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._asked: set[asyncio.Task[None]] = set()
        self._is_ending = False

    @property
    def has_ended(self) -> bool:
        """Whether nothing can be called any more."""
        return self._ended.done()

    # Its life, from asyncio

    async def start(self, hosted: TrioProgram) -> Any:
        """Start the loop and what runs in it; gives what that reports.

        Raises:
            BaseException: what it raised in place of starting.

        Cancellation: the loop is told to end.
        """
        started: asyncio.Future[Any] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(hosted, started), name="trio", daemon=True)
        self._thread.start()
        try:
            return await started
        except asyncio.CancelledError:
            self._end_soon()
            raise

    async def aclose(self) -> None:
        """Have what runs end gently, cancel the calls that are left, and wait for the thread.

        Cancellation: the thread ends by itself.
        """
        self._end_soon()
        if self._thread is not None:
            await asyncio.shield(self._ended)

    def _end_soon(self) -> None:
        self._is_ending = True
        token, ending = self._token, self._ending
        if token is not None and ending is not None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(ending.set)

    def _run(self, hosted: TrioProgram, started: asyncio.Future[Any]) -> None:
        error: BaseException | None = None
        try:
            trio.run(self._main, hosted, started)
        except Exception as raised:  # noqa: BLE001 - it is raised where the thread was started
            error = single_error(raised)
        except BaseException as raised:  # noqa: BLE001 - as above
            error = raised
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._note_end, started, error)

    def _note_end(self, started: asyncio.Future[Any], error: BaseException | None) -> None:
        if error is not None and started.done():
            log.error("the server of a replica has failed", exc_info=error)
        _settle(started, None, error or NotReady(_ENDED))
        if not self._ended.done():
            self._ended.set_result(None)

    async def _main(self, hosted: TrioProgram, started: asyncio.Future[Any]) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._ending = trio.Event()
        if self._is_ending:
            self._ending.set()
        async with trio.open_nursery() as nursery:
            value = await nursery.start(self._host, hosted, nursery.cancel_scope)
            self._nursery = nursery
            self._loop.call_soon_threadsafe(_settle, started, value, None)

    async def _host(
        self, hosted: TrioProgram, everything: trio.CancelScope, *, task_status: trio.TaskStatus[Any]
    ) -> None:
        assert self._ending is not None  # noqa: S101 - made before
        await hosted(self._ending.wait, task_status=task_status)
        everything.cancel()

    # Calls from asyncio

    async def call(self, function: Callable[..., Awaitable[_T]], *arguments: Any) -> _T:
        """Run an async function on the trio side, in a task of its own.

        Raises:
            Exception: what it raised.
            NotReady: the other side has ended.

        Cancellation: at once, and of its work.
        """
        crossing = _Crossing(self._loop, function, arguments)
        self._soon(self._begin, crossing)
        try:
            result: _T = await crossing.done
        except asyncio.CancelledError:
            with suppress(NotReady):
                self._soon(crossing.scope.cancel)
            raise
        return result

    def _soon(self, function: Callable[..., Any], *arguments: Any) -> None:
        if self._token is None:
            raise NotReady(_ENDED)
        try:
            self._token.run_sync_soon(function, *arguments)
        except trio.RunFinishedError:
            raise NotReady(_ENDED) from None

    def _begin(self, crossing: _Crossing) -> None:
        if self._nursery is None or self._nursery.cancel_scope.cancel_called:
            crossing.settle(None, NotReady(_ENDED))
        else:
            self._nursery.start_soon(crossing.run)

    # Questions from trio

    async def ask(self, function: Callable[..., Awaitable[_T]], *arguments: Any) -> _T:
        """Run an async function on the asyncio side, from a task of the trio side.

        Raises:
            Exception: what it raised.

        Cancellation: at once, and of its work.
        """
        question = _Question(trio.lowlevel.current_task(), trio.lowlevel.current_trio_token())
        self._loop.call_soon_threadsafe(self._answer, question, function, arguments)

        def leave(_: Any) -> trio.lowlevel.Abort:
            question.is_waiting = False
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(question.cancel)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(leave)
        if question.error is not None:
            raise question.error
        result: _T = question.result
        return result

    def _answer(self, question: _Question, function: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> None:
        question.task = self._loop.create_task(question.run(function, arguments))
        self._asked.add(question.task)
        question.task.add_done_callback(self._asked.discard)


class _Crossing:
    """A call from asyncio, until its outcome is known there."""

    __slots__ = ("_arguments", "_function", "_loop", "done", "scope")

    def __init__(self, loop: asyncio.AbstractEventLoop, function: Callable[..., Any], arguments: Any) -> None:
        self._loop = loop
        self._function = function
        self._arguments = arguments
        self.done: asyncio.Future[Any] = loop.create_future()
        self.scope = trio.CancelScope()

    async def run(self) -> None:
        """Make the call, in a task of trio's."""
        result, error = None, None
        try:
            with self.scope:
                try:
                    result = await self._function(*self._arguments)
                except Exception as raised:  # noqa: BLE001 - it is raised where the call came from
                    error = raised
            if self.scope.cancelled_caught:
                return
        except BaseException:
            self.settle(None, NotReady(_ENDED))
            raise
        self.settle(result, error)

    def settle(self, result: Any, error: BaseException | None) -> None:
        """Tell the outcome, from the trio side."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_settle, self.done, result, error)


class _Question:
    """A call from trio, until its outcome is known there."""

    __slots__ = ("_asker", "_token", "error", "is_waiting", "result", "task")

    def __init__(self, asker: trio.lowlevel.Task, token: trio.lowlevel.TrioToken) -> None:
        self._asker = asker
        self._token = token
        self.is_waiting = True
        self.result: Any = None
        self.error: BaseException | None = None
        self.task: asyncio.Task[None] | None = None

    async def run(self, function: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> None:
        """Make the call, in a task of asyncio's."""
        try:
            self.result = await function(*arguments)
        except asyncio.CancelledError:
            self.error = NotReady("the call was cancelled")
        except Exception as raised:  # noqa: BLE001 - it is raised where the call came from
            self.error = raised
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._wake)

    def cancel(self) -> None:
        """Stop the task, from the asyncio side."""
        if self.task is not None:
            self.task.cancel()

    def _wake(self) -> None:
        if self.is_waiting:
            self.is_waiting = False
            trio.lowlevel.reschedule(self._asker)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
