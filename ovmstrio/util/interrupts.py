"""SIGINT handling of commands: immediate exit during startup, afterwards a deferred ``KeyboardInterrupt``.

An exception raised inside an import or the event loop would be lost or printed. The handler therefore sends SIGINT
again until other code runs, or the server installs its signal receiver. Import this module first: it imports no Python
modules, because SIGINT during such an import prints a traceback.
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
_DEFERRING_MODULES: Final = ("importlib._bootstrap", "importlib._bootstrap_external", "trio._core._run")


def exit_at_interrupt() -> None:
    """Exit with 130 at SIGINT, without cleanup; no effect if SIGINT is ignored, as under nohup."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    if signal.getsignal(signal.SIGINT) in {signal.default_int_handler, raise_interrupt}:
        signal.signal(signal.SIGINT, _exit)


def ignore_interrupts() -> None:
    """Ignore SIGINT, including a deferred one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0)


def raise_at_interrupt() -> None:
    """Raise ``KeyboardInterrupt`` at SIGINT, deferred while an import or the event loop runs."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        signal.signal(signal.SIGINT, raise_interrupt)
        report = sys.unraisablehook

        def hook(lost: Any) -> None:
            (_retry if lost.exc_type is KeyboardInterrupt else report)(lost)

        sys.unraisablehook = hook


def raise_interrupt(_number: int, frame: FrameType | None) -> None:
    """Raise ``KeyboardInterrupt``, deferred while an import or the event loop runs; a second SIGINT exits.

    Raises:
        KeyboardInterrupt: neither runs.
    """
    while frame is not None:
        if frame.f_globals.get("__name__") in _DEFERRING_MODULES:
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
    """Call an async function; SIGINT cancels the call and raises ``KeyboardInterrupt``.

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
