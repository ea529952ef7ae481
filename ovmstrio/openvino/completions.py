"""Brings the ends of inferences from OpenVINO's threads to the event loop, many with one wake-up."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from time import perf_counter
from typing import Any, Final

import trio

__all__ = ["Completion", "CompletionQueue"]

_LATE_SECONDS: Final = 0.0005
"""How much later the loop may hear of an end, for it to hear of several at once."""
_LATE_SECONDS_OF_MANY: Final = 0.008
"""The same where there are more calls than requests, each of which waits for many others anyway."""
_LEAST_SECONDS: Final = 1e-5

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
    """The ends of one model's inferences that the event loop has yet to hear of.

    OpenVINO's threads only append, and the first one behind an empty queue wakes the loop: who waits for Python's lock
    holds up the device's next callback.

    While the device has inferences enough, some ends wait for each other: behind an inference the loop finds other
    things in the processor's caches than its own, and the first of several calls pays for all of them.

    Args:
        side_by_side: how many inferences the device runs at once.
        streams: of the model.

    Attributes:
        side_by_side: as given.
        has_begun: whether it belongs to a loop.
        most_waiting: how many ends may wait for another one before the loop hears of them; 0 for none.
        running: how many inferences were begun whose ends the loop has not heard of.
    """

    __slots__ = ("_ended", "_last", "_token", "_woken", "has_begun", "most_waiting", "running", "side_by_side")

    def __init__(self, side_by_side: int, streams: int = 1) -> None:
        self._token: trio.lowlevel.TrioToken | None = None
        self._ended: deque[trio.Event] = deque()
        self._woken = False
        self.has_begun = False
        self.be_of(side_by_side, streams)
        self.most_waiting = 0
        self.running = 0

    def begin(self) -> None:
        """Belong to the loop that runs; before anything is expected."""
        self._token = trio.lowlevel.current_trio_token()
        self.has_begun = True

    def be_of(self, side_by_side: int, streams: int) -> None:
        """Be of a model that runs so many at once in so many streams from now on."""
        self.side_by_side = side_by_side
        self._last = deque([0.0] * max(1, streams), maxlen=max(1, streams))

    def let_wait(self, seconds: float, most: int, *, is_crowded: bool) -> None:
        """Say how many ends the loop may hear of late, by what an inference takes on the device.

        Longer where calls wait for a request, and longer for that.
        """
        late = _LATE_SECONDS_OF_MANY if is_crowded else _LATE_SECONDS
        self.most_waiting = min(most, int(late * self.side_by_side / max(seconds, _LEAST_SECONDS)))

    def ends(self, now: float) -> float:
        """Note that an inference ends; gives when its stream was done with the one before, by ``perf_counter``.

        Called by OpenVINO's threads, in the order of the ends: the loop's tasks, which hear of several at once, go on
        in no order.
        """
        before = self._last[0]
        self._last.append(now)
        return before

    def miss(self) -> None:
        """Know of an inference that has ended without a word, and set what waited for its word; on the loop."""
        self.running -= 1
        self.hear()

    def add(self, done: trio.Event) -> None:
        """Have an event set on the loop, now or with later ones; called by any thread."""
        self._ended.append(done)
        waiting = len(self._ended)
        # More than the device can run are left with it, so that another end is near.
        if (
            self._token is None
            or self._woken
            or (waiting <= self.most_waiting and self.running - waiting > self.side_by_side)
        ):
            return
        self._woken = True
        try:
            self._token.run_sync_soon(self.hear)
        except trio.RunFinishedError:
            return

    def hear(self) -> None:
        """Set all events that wait; on the loop."""
        # In this order: what is appended from here on wakes the loop again, or is still found.
        self._woken = False
        ended = self._ended
        while ended:
            # Too few for a moment at the most, at which the loop is woken once in vain.
            self.running -= 1
            ended.popleft().set()


class Completion:
    """The end of one request's inference; what OpenVINO calls.

    It is apart from the request because that keeps its callback alive in a way that Python's garbage collector cannot
    see: a callback that leads back to the request would leak both.

    Attributes:
        done: is set on the loop when the inference has succeeded, and only then by OpenVINO.
        at: when it succeeded, by ``perf_counter``; 0 until then.
        free_at: when its stream was done with the one before.
    """

    __slots__ = ("_to", "at", "done", "free_at")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.at = self.free_at = 0.0
        self._to: CompletionQueue | None = None

    def expect(self, queue: CompletionQueue) -> trio.Event:
        """Begin to wait for the next inference, whose end is told to a queue."""
        self._to = queue
        if not queue.has_begun:
            queue.begin()
        queue.running += 1
        self.at = self.free_at = 0.0
        self.done = trio.Event()
        return self.done

    def __call__(self, _: Any) -> None:
        """Be called by OpenVINO, into whose thread no exception must get out."""
        self.at = perf_counter()
        if not _calling_thread.is_kept:
            _calling_thread.keep()
        to, self._to = self._to, None
        if to is not None:
            self.free_at = to.ends(self.at)
            # Runs that nobody waits for, as those that mend a model, are told to nobody.
            to.add(self.done)
