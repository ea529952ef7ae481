"""Async hooks in tasks of their own, so that one that ignores its cancellation keeps nobody waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from ovmstrio.runtimes.ops.executor import op_failures as failures
from ovmstrio.work.user_code.calls import UserCodeRaisedError, call_on_loop

__all__ = ["LoopCalls"]


class _Call:
    """One call; ``is_over`` once the function has ended, with a value, an error, or neither if it was cancelled."""

    __slots__ = ("error", "is_over", "scope", "value")

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.is_over = trio.Event()
        self.value: Any = None
        self.error: Exception | None = None


class LoopCalls:
    """The calls of one copy of an Op, or of the ends of a pipeline.

    Args:
        nursery: hosts them; ends when all of them have ended.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._under_way: set[_Call] = set()

    @property
    def running(self) -> int:
        """How many calls have not ended, with those whose callers have gone."""
        return len(self._under_way)

    @property
    def left_alone(self) -> int:
        """How many calls have not ended though they are cancelled, for their callers have gone."""
        return sum(call.scope.cancel_called for call in self._under_way)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on the loop, and give what it gives, or what comes of awaiting that.

        Raises:
            UserCodeRaisedError: it raised.
            OpFailure: 3001, the pipeline has ended before it did.

        Ownership: the arguments until the call has ended, which may be after this has been cancelled.

        Cancellation: at once; the call is cancelled, and goes on until it has ended.
        """
        call = _Call()
        self._under_way.add(call)
        self._nursery.start_soon(self._run, call, function, args)
        try:
            await call.is_over.wait()
        except trio.Cancelled:
            call.scope.cancel()
            raise
        if call.error is not None:
            raise call.error
        return call.value

    async def _run(self, call: _Call, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            with call.scope:
                call.value = await call_on_loop(function, args)
        except UserCodeRaisedError as raised:
            call.error = raised
        except trio.Cancelled:
            call.error = failures.closed()
            raise
        except GeneratorExit as raised:  # nobody closes a task, so that it is the function's own
            call.error = UserCodeRaisedError(raised)
        finally:
            self._under_way.discard(call)
            call.is_over.set()

    async def idle(self) -> None:
        """Wait until every call has ended.

        Cancellation: at once.
        """
        while self._under_way:
            await next(iter(self._under_way)).is_over.wait()
