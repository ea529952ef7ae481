"""Brings the ends of inferences from OpenVINO's threads to the event loop, many with one wake-up."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from time import perf_counter
from typing import Any, Final

import trio

__all__ = ["Completion", "CompletionQueue", "current_completions"]

_take_state: Final = ctypes.pythonapi.PyGILState_Ensure


class _CallingThread(threading.local):
    """What Python knows of the running thread, for as long as it knows it."""

    is_kept = False

    def keep(self) -> None:
        """Have Python know the thread to its end.

        It would forget a thread that is not its own behind each callback, and make all of that anew for the next one,
        with memory from the system and back to it.  OpenVINO has few such threads, and uses them for its next models.
        """
        self.is_kept = True
        _take_state()


_calling_thread: Final = _CallingThread()


class CompletionQueue:
    """The ends that the event loop has yet to hear of; made on the loop.

    OpenVINO's threads only append, and the first one behind an empty queue wakes the loop: who waits for Python's lock
    holds up the device's next callback.
    """

    __slots__ = ("_ended", "_token", "_woken")

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._ended: deque[trio.Event] = deque()
        self._woken = False

    def add(self, done: trio.Event) -> None:
        """Have an event set on the loop; called by any thread."""
        self._ended.append(done)
        if self._woken:
            return
        self._woken = True
        try:
            self._token.run_sync_soon(self._set)
        except trio.RunFinishedError:
            return

    def _set(self) -> None:
        # In this order: what is appended from here on wakes the loop again, or is still found.
        self._woken = False
        ended = self._ended
        while ended:
            ended.popleft().set()


_current: Final = trio.lowlevel.RunVar[CompletionQueue]("completions")


def current_completions() -> CompletionQueue:
    """Give the one of this run of the loop."""
    try:
        return _current.get()
    except LookupError:
        made = CompletionQueue()
        _current.set(made)
        return made


class Completion:
    """The end of one request's inference; what OpenVINO calls.

    It is apart from the request because that keeps its callback alive in a way that Python's garbage collector cannot
    see: a callback that leads back to the request would leak both.

    Attributes:
        done: is set on the loop when the inference has succeeded, and only then by OpenVINO.
        at: when it succeeded, by ``perf_counter``; 0 until then.
    """

    __slots__ = ("_to", "at", "done")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.at = 0.0
        self._to: CompletionQueue | None = None

    def expect(self) -> trio.Event:
        """Begin to wait for the next inference."""
        self._to = current_completions()
        self.at = 0.0
        self.done = trio.Event()
        return self.done

    def __call__(self, _: Any) -> None:
        """Be called by OpenVINO, into whose thread no exception must get out."""
        self.at = perf_counter()
        if not _calling_thread.is_kept:
            _calling_thread.keep()
        if self._to is not None:
            self._to.add(self.done)
