"""Those who are told of every call, and what an event is when it starts and ends."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from ovmstrio.core.events import OK, CallEvent, CallObserver, Step, current_event, current_request
from ovmstrio.dataplane.observed_call import code_of
from ovmstrio.observability.call_statistics import CallStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ovmstrio.registry import Lease

__all__ = ["CallObservers"]


class CallObservers:
    """Tells of calls, one observer after the other.

    Args:
        observers: are told.

    Attributes:
        statistics: of all calls.
    """

    def __init__(self, observers: Sequence[CallObserver]) -> None:
        self._started: tuple[Callable[[CallEvent], None], ...] = _methods(observers, "call_started")
        self._moved: tuple[Callable[[CallEvent, Step], None], ...] = _methods(observers, "call_moved")
        self._finished: tuple[Callable[[CallEvent], None], ...] = _methods(observers, "call_finished")
        self._failed: tuple[Callable[[CallEvent], None], ...] = _methods(observers, "call_failed")
        self.statistics = CallStatistics()

    def start(self, event: CallEvent, lease: Lease | None = None) -> None:
        """Tell that a call has found its service; it is the running task's until it ends."""
        if lease is not None and lease.waited_seconds:
            event.queue_seconds = lease.waited_seconds
            event.started -= lease.waited_seconds
        current_event.set(event)
        request = current_request.get()
        if request is not None:
            event.request, request.event = request.told, event
        for tell in self._started:
            tell(event)

    def move(self, event: CallEvent, step: Step) -> None:
        """Tell what moves in a call."""
        for tell in self._moved:
            tell(event, step)

    def end(self, event: CallEvent, error: BaseException | None) -> None:
        """Tell that a call has ended, and with what."""
        event.seconds = perf_counter() - event.started
        event.code = event.code or (OK if error is None else code_of(error))
        event.error = event.error or error
        if not event.compute_seconds:
            event.compute_seconds = event.seconds - event.queue_seconds
        self.statistics.call_finished(event)
        for tell in self._finished:
            tell(event)
        if event.code != OK:
            for tell in self._failed:
                tell(event)
        current_event.set(None)


def _methods(observers: Sequence[CallObserver], name: str) -> tuple[Any, ...]:
    """Give the observers' methods of a name, but for those that do nothing."""
    nothing = getattr(CallObserver, name)
    return tuple(getattr(each, name) for each in observers if getattr(type(each), name, nothing) is not nothing)
