"""Ctrl-C while a library waits that cannot stand an exception in the middle of it."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["interrupts_cancel"]


@contextmanager
def interrupts_cancel(cancel: Callable[[], object]) -> Iterator[None]:
    """Answer Ctrl-C inside the block with ``cancel``, and raise it when the block is left.

    Raised at once, it may come between the taking of a lock and the code that gives it back, and whoever wants the
    lock next waits for ever.  In other threads, and where the program has a handler of its own, nothing changes.

    Raises:
        KeyboardInterrupt: Ctrl-C came.
    """
    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    came = False

    def answer(*_: object) -> None:
        nonlocal came
        came = True
        cancel()

    signal.signal(signal.SIGINT, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt
