"""The signals that end a server, at the first gently, and the one that renews its processes."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any, Final

import structlog
import trio

from ovmstrio.server.end_watchdog import END_WATCHDOG

__all__ = ["obey_renewals", "obey_signals"]

log = structlog.get_logger(__name__)

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


async def obey_signals(
    drain: Callable[[], Awaitable[None]],
    everything: trio.CancelScope,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Drain at the first signal, stop at once at the second.

    Args:
        drain: ends the server gently.
        everything: what is cancelled to stop at once.
        task_status: is told once signals are heard.

    Ownership: the task that drains.
    Cancellation: at any checkpoint, the drain's too; signals have their usual effect again.
    """
    with trio.open_signal_receiver(*_SIGNALS) as signals:
        _start_watchdog_at_signals()
        task_status.started()
        async with trio.open_nursery() as nursery:
            async for number in signals:
                if nursery.child_tasks:
                    END_WATCHDOG.start_at_once()
                    log.warning("stopping at once", signal=signal.Signals(number).name)
                    everything.cancel()
                    return
                log.info("draining", signal=signal.Signals(number).name)
                nursery.start_soon(drain)


def _start_watchdog_at_signals() -> None:
    """Start the watchdog in the signal handlers, because a stuck event loop does not receive the signals."""
    for number in _SIGNALS:
        receive = signal.getsignal(number)

        def handle(number: int, frame: FrameType | None, receive: Any = receive) -> None:
            END_WATCHDOG.start()
            receive(number, frame)

        signal.signal(number, handle)


async def obey_renewals(
    renew: Callable[[], Awaitable[None]], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Renew at each SIGHUP, one time after the other.

    Args:
        renew: starts the processes of a server anew.
        task_status: is told once the signal is heard.

    Cancellation: at any checkpoint, the renewal's too; the signal has its usual effect again.
    """
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        task_status.started()
        async for _ in signals:
            log.info("renewing processes")
            await renew()
