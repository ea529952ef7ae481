"""Requests that a process answers part by part, such as window by window; all that are open take turns."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import trio

from ovmstrio.core.errors import ModelFailure, Overloaded, ServerError
from ovmstrio.openvino.engine.frames import PART, REFUSED, decode_failure
from ovmstrio.work.processes import WorkerEnded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from typing import Self

    from ovmstrio.runtimes.generation.engine_link import AskedEngine
    from ovmstrio.runtimes.generation.sharing.choosing_engine import Engine

__all__ = ["TurnQueue", "TurnTaker"]

_PartT = TypeVar("_PartT")

_SECONDS_TO_TELL: Final = 5.0
"""How long a message to a process may wait for it to read others."""

_TURNS: Final = 4
"""How many requests take turns; what is to be done for others stays where it is."""


class TurnTaker(Generic[_PartT]):
    """A request that is being answered.

    Args:
        number: the process's number for it.
        turns: of which it has one while parts are made.
        most_parts: how many parts may wait for whoever takes them, before no more are made.

    Attributes:
        is_over: whether nothing more will come.
    """

    def __init__(self, number: int, turns: trio.Semaphore, most_parts: float = math.inf) -> None:
        self.number = number
        self.is_over = False
        self._turns = turns
        self._has_turn = True
        self._most_parts = most_parts
        self._parts: deque[_PartT] = deque()
        self._error: ServerError | None = None
        self._changes = trio.lowlevel.ParkingLot()

    @abstractmethod
    def take(self, told: dict[str, Any]) -> None:
        """Take what the process has told of a part."""

    def put(self, part: _PartT) -> None:
        """Have a part wait for whoever takes it."""
        self._parts.append(part)
        self._changes.unpark_all()

    def end(self, error: ServerError | None = None) -> None:
        """Note that nothing more will come, because of an error if there is one."""
        if not self.is_over:
            self.is_over, self._error = True, error
            self.leave_turn()
            self._changes.unpark_all()

    def leave_turn(self) -> None:
        """Let another one be answered."""
        if self._has_turn:
            self._has_turn = False
            self._turns.release()

    async def make_room(self) -> None:
        """Wait until there is room for a part, and for a turn if another one has had it meanwhile.

        Cancellation: at any time; there is no turn then.
        """
        if len(self._parts) < self._most_parts:
            return
        self.leave_turn()
        while len(self._parts) >= self._most_parts:
            await self._changes.park()
        await self._turns.acquire()
        if self.is_over:
            self._turns.release()
        else:
            self._has_turn = True

    # No generator, which whoever leaves a loop early would have to close.
    def __aiter__(self) -> Self:
        """Give parts until the end."""
        return self

    async def __anext__(self) -> _PartT:
        """Wait for the next part.

        Raises:
            ServerError: there will be none.
        """
        await trio.lowlevel.checkpoint()
        while not self._parts:
            if self._error is not None:
                raise self._error
            if self.is_over:
                raise StopAsyncIteration
            await self._changes.park()
        part = self._parts.popleft()
        self._changes.unpark_all()
        return part


_TakerT = TypeVar("_TakerT", bound=TurnTaker[Any])


class TurnQueue(Generic[_TakerT]):
    """All requests of one model, through whichever processes it lives.

    Args:
        make: makes a request of its number and the turns.
        most_waiting: how many may wait for a turn.
        tasks: hosts a task for each; as long as it is open, requests can be answered.
        noun: what several of them are called, for who is refused.
        numbers: for requests; no two have the same.

    Attributes:
        open: how many requests there are.
        last_asked: when somebody has asked last, or has got an answer, on trio's clock.
    """

    def __init__(
        self,
        make: Callable[[int, trio.Semaphore], _TakerT],
        most_waiting: int,
        tasks: trio.Nursery,
        noun: str,
        numbers: Iterator[int],
    ) -> None:
        self._make = make
        self._most = _TURNS + most_waiting
        self._tasks = tasks
        self._noun = noun
        self._numbers = numbers
        self._turns = trio.Semaphore(_TURNS, max_value=_TURNS)
        self._emptied = trio.Event()
        self.running: dict[int, _TakerT] = {}
        self.open = 0
        self.last_asked = -math.inf

    async def idle(self) -> None:
        """Wait until there is no request.

        Cancellation: at once.
        """
        while self.open:
            self._emptied = trio.Event()
            await self._emptied.wait()

    def hear(self, frame: Any) -> None:
        """Take what a process has told by itself.

        Raises:
            ValueError: always; a process that tells something has another queue.
        """
        raise ValueError(f"nobody asked for {frame!r:.80}")

    def lose(self, why: str) -> None:
        """Tell all requests that their process has ended."""
        for each in self.running.values():
            each.end(ModelFailure(why))

    @asynccontextmanager
    async def ask(self, engine: Engine, *opening: Any) -> AsyncIterator[_TakerT]:
        """Have a request answered, once it is its turn.

        Args:
            engine: where the model lives.
            opening: what the process is told of the request.

        Raises:
            InvalidField: the process has refused it.
            Overloaded: too many wait.
            ServerError: the model failed, or its process ended.

        Ownership: the request, which the process drops when the block is left.
        Cancellation: anywhere.
        """
        if self.open >= self._most:
            raise Overloaded(f"{self.open} {self._noun} or wait, as many as may; try again later")
        self.open += 1
        try:
            await self._turns.acquire()
            taker = self._make(next(self._numbers), self._turns)
            try:
                async with self._opened(await engine.ready(), taker, opening):
                    yield taker
            finally:
                # One that waits for its turn to come again gets none, or leaves it at once.
                taker.end()
        finally:
            self.open -= 1
            self.last_asked = trio.current_time()
            if not self.open:
                self._emptied.set()

    @asynccontextmanager
    async def _opened(self, process: AskedEngine, taker: _TakerT, opening: tuple[Any, ...]) -> AsyncIterator[None]:
        number = taker.number
        self.running[number] = taker
        scope = trio.CancelScope()
        try:
            await _call(process, ["open", number, *opening])
            # A nursery of its own would put what the caller's block raises into a group.
            self._tasks.start_soon(_answer_all, process, taker, scope)
            yield
        finally:
            scope.cancel()
            del self.running[number]
            await _close(process, number)


async def _answer_all(process: AskedEngine, taker: TurnTaker[Any], scope: trio.CancelScope) -> None:
    """Have one part after the other made, until a scope is cancelled.

    Cancellation: at once; a part that has been begun is abandoned.
    """
    with scope:
        try:
            while not taker.is_over:
                await taker.make_room()
                taker.take(await _call(process, ["part", taker.number]))
        except ServerError as error:
            taker.end(error)


async def _close(process: AskedEngine, number: int) -> None:
    with trio.CancelScope(shield=True, deadline=trio.current_time() + _SECONDS_TO_TELL), suppress(WorkerEnded):
        await process.tell(["close", number])


async def _call(process: AskedEngine, value: list[Any]) -> Any:
    try:
        kind, *told = await process.call(value)
    except WorkerEnded as ended:
        raise ModelFailure(f"the process of the model {ended.why}") from ended
    if kind == REFUSED:
        raise decode_failure(told[0])
    return told[0] if kind == PART else None
