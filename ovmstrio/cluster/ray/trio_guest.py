"""A trio loop as a guest of an asyncio one, in its thread, and the one bridge between the two.

::

    asyncio ── call(function) ──> a task and a cancel scope ──> its result ──> asyncio
    trio ───── ask(function) ───> a task of asyncio ──────────> its result ──> trio

Whoever is cancelled on one side has what it waits for cancelled on the other.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, Final, Protocol, TypeVar

import structlog
import trio

from ovmstrio.core.errors import NotReady
from ovmstrio.transport.grpc.headers import single_error

__all__ = ["GuestTurns", "TrioGuest", "TrioProgram"]

# ----------------------------------------------------------------------
# When a loop of trio that is a guest of an asyncio loop, in the same thread, has its turns
# ----------------------------------------------------------------------

_RESTING_SECONDS: Final = 0.05
"""How long what nobody waits for may go unnoticed."""
_ASKING_SECONDS: Final = 0.001
"""The same while calls wait for the host alone, as far as is known: some part of theirs may wait for the outside."""
_AT_ONCE: Final = 4


class GuestTurns(trio.abc.Clock):
    """The clock of a guest run, which trio asks how long it may sleep, and what the run hands its turns to.

    Args:
        loop: the host.

    Attributes:
        calls: how many calls have not ended, and whatever else may not go unnoticed.
        asking: how many questions to the host those wait for.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.calls = 0
        self.asking = 0
        self._turn: Callable[[], object] | None = None
        self._is_idle = False
        self._deadline = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf

    # As trio's clock

    def start_clock(self) -> None:
        """Need no start."""

    def current_time(self) -> float:
        """Give the time, in seconds."""
        return perf_counter()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Tell how long trio may wait for events; it asks where nothing can run."""
        self._is_idle, self._deadline = True, deadline
        # With no time to wait it hands its next turn over, and starts no thread.
        return deadline - perf_counter() if self._waits_outside else 0.0

    @property
    def _waits_outside(self) -> bool:
        return self.calls > self.asking

    # As what the run hands its turns to

    def hold(self, turn: Callable[[], object]) -> None:
        """Take over the next turn, from the host's thread."""
        self._turn = turn
        if self._is_idle and not self._waits_outside:
            self._wake_at(min(self._deadline, perf_counter() + (_ASKING_SECONDS if self.calls else _RESTING_SECONDS)))
        else:
            self._loop.call_soon(self._take)

    def deliver(self, turn: Callable[[], object]) -> None:
        """Have the host take a turn for which a thread has waited, from any thread.

        Raises:
            RuntimeError: the host has ended.
        """
        self._loop.call_soon_threadsafe(self._run, turn)

    def take_now(self) -> None:
        """Take a turn, and some more while there is something to do, where trio does not wait in a thread.

        What has been handed to trio from outside of a turn is seen to; without a turn in hand trio is woken by itself.
        """
        for _ in range(_AT_ONCE):
            if not self._take() or self._is_idle:
                return

    def _take(self) -> bool:
        turn, self._turn = self._turn, None
        if turn is None:
            return False
        self._run(turn)
        return True

    def _run(self, turn: Callable[[], object]) -> None:
        self._is_idle = False
        turn()

    def _wake_at(self, due: float) -> None:
        """See that a turn is taken by then; a timer that comes earlier is kept, for making one costs more than it."""
        if self._due <= due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = self._loop.call_later(max(0.0, due - perf_counter()), self._wake)

    def _wake(self) -> None:
        self._timer, self._due = None, math.inf
        self._take()

    def stop(self) -> None:
        """Drop the timer, behind the last turn."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# ----------------------------------------------------------------------
# A trio loop as a guest of an asyncio one, in its thread, and the one bridge between the two
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

_T = TypeVar("_T")

_ENDED: Final = "the replica has ended"


class TrioProgram(Protocol):
    """What runs on the trio side beside the calls."""

    async def __call__(self, until: Callable[[], Awaitable[None]], *, task_status: trio.TaskStatus[Any]) -> None:
        """Run until ``until`` returns and it has come to an end of its own; calls are taken once it has started."""
        ...


class TrioGuest:
    """The loop of trio, as the asyncio side sees it; made on a running asyncio loop, in whose thread it runs.

    Ownership: the run of trio, which :meth:`aclose` ends, and every call in it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._turns = GuestTurns(self._loop)
        self._nursery: trio.Nursery | None = None
        self._ending: trio.Event | None = None
        self._started: asyncio.Future[Any] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._asked: set[asyncio.Task[None]] = set()
        self._is_running = False
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
        self._is_running = True
        self._turns.calls += 1
        trio.lowlevel.start_guest_run(
            self._main,
            hosted,
            run_sync_soon_threadsafe=self._turns.deliver,
            run_sync_soon_not_threadsafe=self._turns.hold,
            done_callback=self._note_end,
            host_uses_signal_set_wakeup_fd=True,
            clock=self._turns,
        )
        try:
            return await self._started
        except asyncio.CancelledError:
            self._end_soon()
            raise
        finally:
            self._turns.calls -= 1

    async def aclose(self) -> None:
        """Have what runs end gently, cancel the calls that are left, and wait for the end.

        Cancellation: it ends by itself.
        """
        self._end_soon()
        if self._is_running:
            await asyncio.shield(self._ended)

    def _end_soon(self) -> None:
        if self._is_ending:
            return
        self._is_ending = True
        # From here on nothing may go unnoticed.
        self._turns.calls += 1
        if self._ending is not None and not self.has_ended:
            self._ending.set()
            self._turns.take_now()

    def _note_end(self, outcome: Any) -> None:
        self._turns.stop()
        error: BaseException | None = None
        try:
            outcome.unwrap()
        except Exception as raised:  # noqa: BLE001 - it is raised where the loop was started
            error = single_error(raised)
        except BaseException as raised:  # noqa: BLE001 - as above
            error = raised
        if error is not None and self._started.done():
            log.error("the server of a replica has failed", exc_info=error)
        _settle(self._started, None, error or NotReady(_ENDED))
        _settle(self._ended, None, None)

    async def _main(self, hosted: TrioProgram) -> None:
        self._ending = trio.Event()
        if self._is_ending:
            self._ending.set()
        async with trio.open_nursery() as nursery:
            value = await nursery.start(self._host, hosted, nursery.cancel_scope)
            self._nursery = nursery
            _settle(self._started, value, None)

    async def _host(
        self, hosted: TrioProgram, everything: trio.CancelScope, *, task_status: trio.TaskStatus[Any]
    ) -> None:
        assert self._ending is not None  # noqa: S101 - made before
        await hosted(self._ending.wait, task_status=task_status)
        everything.cancel()

    # Calls from asyncio

    async def call(self, function: Callable[..., Awaitable[_T]], *arguments: Any) -> _T:
        """Run an async function on the trio side, in a task of its own; work that does not wait is done at once.

        Raises:
            Exception: what it raised.
            NotReady: the other side has ended.

        Cancellation: at once, and of its work.
        """
        nursery = self._nursery
        if nursery is None or nursery.cancel_scope.cancel_called or self.has_ended:
            raise NotReady(_ENDED)
        crossing = _Crossing(function, arguments, self._turns)
        nursery.start_soon(crossing.run)
        self._turns.take_now()
        if not crossing.has_ended:
            crossing.done = self._loop.create_future()
            try:
                await crossing.done
            except asyncio.CancelledError:
                crossing.scope.cancel()
                self._turns.take_now()
                raise
        if crossing.error is not None:
            raise crossing.error
        result: _T = crossing.result
        return result

    # Questions from trio

    async def ask(self, function: Callable[..., Awaitable[_T]], *arguments: Any) -> _T:
        """Run an async function on the asyncio side, from a task of the trio side.

        Raises:
            Exception: what it raised.

        Cancellation: at once, and of its work.
        """
        question = _Question(trio.lowlevel.current_task(), self._turns)
        self._turns.asking += 1
        question.task = self._loop.create_task(question.run(function, arguments))
        self._asked.add(question.task)
        question.task.add_done_callback(self._asked.discard)

        def leave(_: Any) -> trio.lowlevel.Abort:
            question.stop_waiting()
            question.task.cancel()
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(leave)
        if question.error is not None:
            raise question.error
        result: _T = question.result
        return result


class _Crossing:
    """A call from asyncio, until its outcome is known."""

    __slots__ = ("_arguments", "_function", "_turns", "done", "error", "has_ended", "result", "scope")

    def __init__(self, function: Callable[..., Any], arguments: Any, turns: GuestTurns) -> None:
        self._function = function
        self._arguments = arguments
        self._turns = turns
        self.scope = trio.CancelScope()
        self.done: asyncio.Future[None] | None = None
        self.has_ended = False
        self.result: Any = None
        self.error: BaseException | None = NotReady(_ENDED)
        turns.calls += 1

    async def run(self) -> None:
        """Make the call, in a task of trio's."""
        try:
            with self.scope:
                try:
                    self.result = await self._function(*self._arguments)
                except Exception as raised:  # noqa: BLE001 - it is raised where the call came from
                    self.error = raised
                else:
                    self.error = None
        finally:
            self._turns.calls -= 1
            self.has_ended = True
            if self.done is not None:
                _settle(self.done, None, None)


class _Question:
    """A call from trio, until its outcome is known there."""

    __slots__ = ("_asker", "_is_waiting", "_turns", "error", "result", "task")

    task: asyncio.Task[None]

    def __init__(self, asker: trio.lowlevel.Task, turns: GuestTurns) -> None:
        self._asker = asker
        self._turns = turns
        self._is_waiting = True
        self.result: Any = None
        self.error: BaseException | None = None

    async def run(self, function: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> None:
        """Make the call, in a task of asyncio's."""
        try:
            self.result = await function(*arguments)
        except asyncio.CancelledError:
            self.error = NotReady("the call was cancelled")
        except Exception as raised:  # noqa: BLE001 - it is raised where the call came from
            self.error = raised
        if self._is_waiting:
            self.stop_waiting()
            trio.lowlevel.reschedule(self._asker)
            self._turns.take_now()

    def stop_waiting(self) -> None:
        """Note that nobody waits for it any more."""
        self._is_waiting = False
        self._turns.asking -= 1


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
