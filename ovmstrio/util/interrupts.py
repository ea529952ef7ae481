"""SIGINT in a command: exit while nothing has begun, and no ``KeyboardInterrupt`` inside imports or the event loop.

The import system and the event loop lose such an exception, or print it and continue. A signal that arrives there is
sent again until it finds other code, or the signal receiver of a server. The module is imported first of all, and
imports nothing that is written in Python, because an interrupt meanwhile prints a traceback.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Awaitable, Callable
    from types import FrameType
    from typing import Any, Final, NoReturn, TypeVar

    _T = TypeVar("_T")
else:
    # The module below ``signal``, which creates enumerations for some milliseconds.
    import _signal as signal

_RETRY_SECONDS: Final = 0.005
_DEFERRING: Final = ("importlib._bootstrap", "importlib._bootstrap_external", "trio._core._run")


def exit_at_interrupt() -> None:
    """Exit with 130 at SIGINT, without cleanup; no effect if SIGINT is ignored, as under nohup."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    if signal.getsignal(signal.SIGINT) in {signal.default_int_handler, raise_interrupt}:
        signal.signal(signal.SIGINT, _exit)


def ignore_interrupts() -> None:
    """Ignore SIGINT, also one that waits to be sent again."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0)


def raise_at_interrupt() -> None:
    """Raise ``KeyboardInterrupt`` at SIGINT, but not inside imports and the event loop, which would lose it."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        signal.signal(signal.SIGINT, raise_interrupt)
        report = sys.unraisablehook

        def hook(lost: Any) -> None:
            (_retry if lost.exc_type is KeyboardInterrupt else report)(lost)

        sys.unraisablehook = hook


def raise_interrupt(_number: int, frame: FrameType | None) -> None:
    """Raise ``KeyboardInterrupt``, later if an import or the event loop runs; a second signal exits instead.

    Raises:
        KeyboardInterrupt: neither runs.
    """
    while frame is not None:
        if frame.f_globals.get("__name__") in _DEFERRING:
            if signal.getitimer(signal.ITIMER_REAL)[0]:
                _exit()
            _retry()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _retry(*_: object) -> None:
    signal.setitimer(signal.ITIMER_REAL, _RETRY_SECONDS)


def _exit(*_: object) -> NoReturn:
    os._exit(128 + signal.SIGINT)


def run_interruptible(function: Callable[[], Awaitable[_T]]) -> _T:
    """Run an async function on trio; SIGINT cancels it.

    Raises:
        KeyboardInterrupt: SIGINT arrived.
        Whatever ``function`` raises.
    """
    import trio  # noqa: PLC0415 - this module is imported first

    return trio.run(interruptible, function)


async def interruptible(function: Callable[[], Awaitable[_T]]) -> _T:
    """Call an async function; SIGINT cancels it, and raises ``KeyboardInterrupt`` then.

    Raises:
        KeyboardInterrupt: SIGINT arrived.
        Whatever ``function`` raises.
    """
    import trio  # noqa: PLC0415 - this module is imported first

    results: list[_T] = []
    failure: Exception | None = None
    is_interrupted = False
    with trio.open_signal_receiver(signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:

            async def cancel_at_signal() -> None:
                nonlocal is_interrupted
                async for _ in signals:
                    is_interrupted = True
                    nursery.cancel_scope.cancel()

            nursery.start_soon(cancel_at_signal)
            try:
                results.append(await function())
            except Exception as error:  # noqa: BLE001 - raised below, without the group of the nursery
                failure = error
            nursery.cancel_scope.cancel()
    if is_interrupted:
        raise KeyboardInterrupt
    if failure is not None:
        raise failure
    return results[0]
