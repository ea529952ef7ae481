"""Single keys from the terminal, without waiting for the end of a line."""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def pressed_keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits up to a number of seconds for a key and returns it, or an empty text.

    The terminal does not echo keys until the end of the block. Ctrl-C works as usual. Without a terminal there are no
    keys.
    """
    if not sys.stdin.isatty():
        yield _wait
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield lambda seconds: _read(descriptor, seconds)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _read(descriptor: int, seconds: float) -> str:
    ready, _, _ = select.select([descriptor], [], [], seconds)
    return os.read(descriptor, 1).decode(errors="replace") if ready else ""
