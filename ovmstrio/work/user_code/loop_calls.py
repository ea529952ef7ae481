"""Async functions of users in tasks of their own, so that one that ignores its cancellation keeps nobody waiting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import trio

from ovmstrio.work.threads.worker_threads import Refusal
from ovmstrio.work.user_code.calls import UserCodeRaisedError, call_on_loop

__all__ = ["LoopCalls"]


class _LoopCall:
    """One call; ``is_over`` once the function has ended, with a value, an error, or neither if it was cancelled."""

    __slots__ = ("error", "is_over", "scope", "value")

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.is_over = trio.Event()
        self.value: Any = None
        self.error: Exception | None = None


class LoopCalls:
    """What :class:`WorkerThreads` is for plain functions whose callers may leave them.

    Args:
        nursery: hosts the calls; ends when all of them have ended.
        ended: gives what callers get when the nursery has been cancelled.
        refusal: says whether there may be another call, after callers have left theirs.
        names: say in the log whose code prints there, where not the caller's context does.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        ended: Callable[[], Exception],
        refusal: Refusal | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._names = names
        self._nursery = nursery
        self._ended = ended
        self._refusal = refusal
        self._under_way: set[_LoopCall] = set()

    @property
    def is_busy(self) -> bool:
        """Whether a call has not ended, with those whose callers have left."""
        return bool(self._under_way)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on the loop, and give what it gives, or what comes of awaiting that.

        Raises:
            UserCodeRaisedError: it raised.
            Exception: the nursery has been cancelled before it ended; or what ``refusal`` gives.

        Ownership: the arguments until the call has ended, which may be after this has been cancelled.

        Cancellation: at once; the call is cancelled, and goes on until it has ended.
        """
        if self._refusal is not None:
            refused = self._refusal(sum(call.scope.cancel_called for call in self._under_way))
            if refused is not None:
                raise refused
        call = _LoopCall()
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

    async def _run(self, call: _LoopCall, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            with call.scope:
                call.value = await call_on_loop(function, args, names=self._names)
        except UserCodeRaisedError as raised:
            call.error = raised
        except trio.Cancelled:
            call.error = self._ended()
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
