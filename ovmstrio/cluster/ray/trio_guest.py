"""Trio as a guest of an asyncio loop in the same thread, and calls in both directions.

::

    asyncio ── call(function) ──> trio task with cancel scope ──> result ──> asyncio
    trio ───── call_asyncio(function) ───> asyncio task ─────────────────> result ──> trio

Cancellation is forwarded in both directions.
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

# Guest scheduling

_IDLE_DELAY_SECONDS: Final = 0.05
"""Maximum delay of events that no call waits for."""
_HOST_DELAY_SECONDS: Final = 0.001
"""Maximum delay of events while every running call waits for asyncio."""
_MAX_TURNS: Final = 4


class GuestTurns(trio.abc.Clock):
    """Clock and scheduler of a guest run.

    Attributes:
        calls: number of running calls, and other work that must not be delayed.
        asking: number of running calls that wait for asyncio.
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

    def start_clock(self) -> None:
        """Do nothing."""

    def current_time(self) -> float:
        """Return the time in seconds."""
        return perf_counter()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Return the time until a deadline; called when no task can run."""
        self._is_idle, self._deadline = True, deadline
        # With a timeout of 0, trio schedules its next turn and starts no thread.
        return deadline - perf_counter() if self._waits_outside else 0.0

    @property
    def _waits_outside(self) -> bool:
        return self.calls > self.asking

    def hold(self, turn: Callable[[], object]) -> None:
        """Schedule the next turn; called in the host's thread."""
        self._turn = turn
        if self._is_idle and not self._waits_outside:
            self._wake_at(
                min(self._deadline, perf_counter() + (_HOST_DELAY_SECONDS if self.calls else _IDLE_DELAY_SECONDS))
            )
        else:
            self._loop.call_soon(self._run_held_turn)

    def deliver(self, turn: Callable[[], object]) -> None:
        """Run a turn after a thread has waited for it; thread-safe.

        Raises:
            RuntimeError: the host loop has ended.
        """
        self._loop.call_soon_threadsafe(self._run, turn)

    def run_turns(self) -> None:
        """Run turns while there is work, unless trio waits in a thread.

        Call this after an event from outside of a turn. If no turn is scheduled, trio wakes itself.
        """
        for _ in range(_MAX_TURNS):
            if not self._run_held_turn() or self._is_idle:
                return

    def _run_held_turn(self) -> bool:
        turn, self._turn = self._turn, None
        if turn is None:
            return False
        self._run(turn)
        return True

    def _run(self, turn: Callable[[], object]) -> None:
        self._is_idle = False
        turn()

    def _wake_at(self, due: float) -> None:
        """Schedule a turn; an earlier timer is kept, as creating one costs more than it saves."""
        if self._due <= due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = self._loop.call_later(max(0.0, due - perf_counter()), self._wake)

    def _wake(self) -> None:
        self._timer, self._due = None, math.inf
        self._run_held_turn()

    def stop(self) -> None:
        """Cancel the timer after the last turn."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# Guest

log = structlog.get_logger(__name__)

_T = TypeVar("_T")

_ENDED: Final = "the replica has stopped"


class TrioProgram(Protocol):
    """Async main function of the guest run."""

    async def __call__(self, until: Callable[[], Awaitable[None]], *, task_status: trio.TaskStatus[Any]) -> None:
        """Run until ``until`` returns; calls are accepted after the start is reported."""


class TrioGuest:
    """Trio loop in the thread of the running asyncio loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._turns = GuestTurns(self._loop)
        self._nursery: trio.Nursery | None = None
        self._stop_event: trio.Event | None = None
        self._started: asyncio.Future[Any] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._asyncio_tasks: set[asyncio.Task[None]] = set()
        self._is_running = False
        self._is_ending = False

    @property
    def has_ended(self) -> bool:
        """True if no calls are possible any more."""
        return self._ended.done()

    async def start(self, hosted: TrioProgram) -> Any:
        """Start the loop and its program, and return the reported value; raises BaseException if the start failed."""
        self._is_running = True
        self._turns.calls += 1
        trio.lowlevel.start_guest_run(
            self._main,
            hosted,
            run_sync_soon_threadsafe=self._turns.deliver,
            run_sync_soon_not_threadsafe=self._turns.hold,
            done_callback=self._on_end,
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
        """Stop the program, cancel remaining calls, and wait for the end."""
        self._end_soon()
        if self._is_running:
            await asyncio.shield(self._ended)

    def _end_soon(self) -> None:
        if self._is_ending:
            return
        self._is_ending = True
        # No event must be delayed from now on.
        self._turns.calls += 1
        if self._stop_event is not None and not self.has_ended:
            self._stop_event.set()
            self._turns.run_turns()

    def _on_end(self, outcome: Any) -> None:
        self._turns.stop()
        error: BaseException | None = None
        try:
            outcome.unwrap()
        except Exception as raised:  # noqa: BLE001 - raised in the starter
            error = single_error(raised)
        except BaseException as raised:  # noqa: BLE001 - as above
            error = raised
        if error is not None and self._started.done():
            log.error("replica server failed", exc_info=error)
        _settle(self._started, None, error or NotReady(_ENDED))
        _settle(self._ended, None, None)

    async def _main(self, hosted: TrioProgram) -> None:
        self._stop_event = trio.Event()
        if self._is_ending:
            self._stop_event.set()
        async with trio.open_nursery() as nursery:
            value = await nursery.start(self._host, hosted, nursery.cancel_scope)
            self._nursery = nursery
            _settle(self._started, value, None)

    async def _host(
        self, hosted: TrioProgram, everything: trio.CancelScope, *, task_status: trio.TaskStatus[Any]
    ) -> None:
        assert self._stop_event is not None  # noqa: S101 - set before
        await hosted(self._stop_event.wait, task_status=task_status)
        everything.cancel()

    async def call(self, function: Callable[..., Awaitable[_T]], *arguments: Any) -> _T:
        """Run an async function in a trio task; it starts at once.

        Raises:
            Exception: as the function.
            NotReady: the loop has ended.
        """
        nursery = self._nursery
        if nursery is None or nursery.cancel_scope.cancel_called or self.has_ended:
            raise NotReady(_ENDED)
        trio_call = _TrioCall(function, arguments, self._turns)
        nursery.start_soon(trio_call.run)
        self._turns.run_turns()
        if not trio_call.has_ended:
            trio_call.done = self._loop.create_future()
            try:
                await trio_call.done
            except asyncio.CancelledError:
                trio_call.scope.cancel()
                self._turns.run_turns()
                raise
        if trio_call.error is not None:
            raise trio_call.error
        result: _T = trio_call.result
        return result

    async def ask(self, function: Callable[..., Awaitable[_T]], *arguments: Any) -> _T:
        """Run an async function in an asyncio task and wait for it in the current trio task.

        Raises:
            Exception: as the function.
        """
        host_call = _AsyncioCall(trio.lowlevel.current_task(), self._turns)
        self._turns.asking += 1
        host_call.task = self._loop.create_task(host_call.run(function, arguments))
        self._asyncio_tasks.add(host_call.task)
        host_call.task.add_done_callback(self._asyncio_tasks.discard)

        def leave(_: Any) -> trio.lowlevel.Abort:
            host_call.stop_waiting()
            host_call.task.cancel()
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(leave)
        if host_call.error is not None:
            raise host_call.error
        result: _T = host_call.result
        return result


class _TrioCall:
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
        try:
            with self.scope:
                try:
                    self.result = await self._function(*self._arguments)
                except Exception as raised:  # noqa: BLE001 - raised in the caller
                    self.error = raised
                else:
                    self.error = None
        finally:
            self._turns.calls -= 1
            self.has_ended = True
            if self.done is not None:
                _settle(self.done, None, None)


class _AsyncioCall:
    __slots__ = ("_is_caller_waiting", "_turns", "_waiting_task", "error", "result", "task")

    task: asyncio.Task[None]

    def __init__(self, asker: trio.lowlevel.Task, turns: GuestTurns) -> None:
        self._waiting_task = asker
        self._turns = turns
        self._is_caller_waiting = True
        self.result: Any = None
        self.error: BaseException | None = None

    async def run(self, function: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> None:
        try:
            self.result = await function(*arguments)
        except asyncio.CancelledError:
            self.error = NotReady("the call was cancelled")
        except Exception as raised:  # noqa: BLE001 - raised in the caller
            self.error = raised
        if self._is_caller_waiting:
            self.stop_waiting()
            trio.lowlevel.reschedule(self._waiting_task)
            self._turns.run_turns()

    def stop_waiting(self) -> None:
        self._is_caller_waiting = False
        self._turns.asking -= 1


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
