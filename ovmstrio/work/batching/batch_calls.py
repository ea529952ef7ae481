"""One caller's item on its way through a batcher, and one run of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Final, Generic, TypeVar

import trio

from ovmstrio.core.errors import NotReady
from ovmstrio.core.tracing import current_span

__all__ = ["BatchRun", "BatchedCall"]

_T = TypeVar("_T")
_R = TypeVar("_R")


class _Nothing:
    """Stands for a result that is not there yet."""


_NOTHING: Final = _Nothing()


class BatchedCall(Generic[_T, _R]):
    """An item, who waits for its result, and that result; equal to itself alone.

    ``run`` is the run that it is part of, None while it waits for one; ``is_left`` tells that nobody waits any more.
    ``span`` is that of its caller, where that is traced.
    """

    __slots__ = ("_error", "_result", "_traceback", "arrived", "done", "is_left", "item", "run", "size", "span")

    def __init__(self, item: _T, size: int, arrived: float) -> None:
        self.item = item
        self.span = current_span.get()
        self.size = size
        self.arrived = arrived
        self.done = trio.Event()
        self.run: BatchRun[_T, _R] | None = None
        self.is_left = False
        self._result: _R | _Nothing = _NOTHING
        self._error: Exception | None = None
        self._traceback: TracebackType | None = None

    def answer(self, result: _R | Exception) -> None:
        """Give the caller its result, or the error to raise."""
        if isinstance(result, Exception):
            self._error, self._traceback = result, result.__traceback__
        else:
            self._result = result
        self.done.set()

    def abandon(self) -> None:
        """Tell a caller without an answer that there will be none."""
        if not self.done.is_set():
            self.answer(NotReady("the request was dropped before it was answered: what serves it is being stopped"))

    def outcome(self) -> _R:
        """Return the result.

        Raises:
            Exception: the error that is the item's outcome.
        """
        if self._error is not None:
            # Callers may share the error of their batch, and its traceback must not grow with each of them.
            raise self._error.with_traceback(self._traceback)
        if isinstance(self._result, _Nothing):
            raise AssertionError("a call was asked for its result before it was done")  # noqa: TRY004 - not of types
        return self._result


class BatchRun(Generic[_T, _R]):
    """Calls whose items run together; ``scope`` is cancelled when none of them is wanted any more."""

    __slots__ = ("_wanted", "calls", "scope")

    def __init__(self, calls: Sequence[BatchedCall[_T, _R]]) -> None:
        self.calls = calls
        self.scope = trio.CancelScope()
        self._wanted = len(calls)
        for call in calls:
            call.run = self

    @property
    def size(self) -> int:
        """The sum of the items' sizes."""
        return sum(call.size for call in self.calls)

    def fail(self, error: Exception) -> None:
        """Give every caller the same error."""
        for call in self.calls:
            call.answer(error)

    def abandon(self) -> None:
        """Tell the callers without an answer that there will be none."""
        for call in self.calls:
            call.abandon()

    def begin(self) -> bool:
        """Leave out the items whose callers have gone since the batch was made; false if there are no others."""
        for call in self.calls:
            if call.is_left:
                call.abandon()
        self.calls = [call for call in self.calls if not call.is_left]
        return bool(self.calls)

    def leave(self) -> bool:
        """Note that one more caller is gone; true if it was the last one, for whom the run is cancelled."""
        self._wanted -= 1
        if self._wanted == 0:
            self.scope.cancel()
        return self._wanted == 0
