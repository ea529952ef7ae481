"""How a process with user code in it came to its end."""

from __future__ import annotations

import signal
from contextlib import suppress

__all__ = ["describe_exit", "signal_name"]


def signal_name(number: int) -> str:
    """Give the name of a signal; those for real-time programs have none."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def describe_exit(code: int) -> str:
    """Say in words what an exit code is, which is below 0 for a signal."""
    if code < 0:
        return f"crashed with {signal_name(-code)}"
    return f"ended the process with exit code {code}"
