"""How a process with user code in it came to its end."""

from __future__ import annotations

import signal

__all__ = ["describe_exit"]


def describe_exit(code: int) -> str:
    """Say in words what an exit code is, which is below 0 for a signal."""
    if code < 0:
        return f"crashed with {signal.Signals(-code).name}"
    return f"ended the process with exit code {code}"
