"""Imports on first use, in a thread."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Final

import trio

_IMPORTS_AT_ONCE: Final = 8
_limiter: Final = trio.lowlevel.RunVar[trio.CapacityLimiter]("import limiter")


def import_limiter() -> trio.CapacityLimiter:
    """Return the limiter of imports in this trio run."""
    try:
        return _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(_IMPORTS_AT_ONCE)
        _limiter.set(limiter)
        return limiter


async def import_aside(name: str) -> ModuleType:
    """Return a module; import it in a thread if needed, so that the event loop keeps running.

    Raises:
        ImportError: the module cannot be imported.

    Cancellation: at once; the import continues in its thread and takes effect.
    """
    known = sys.modules.get(name)
    if known is None or getattr(known.__spec__, "_initializing", False):
        return await trio.to_thread.run_sync(import_module, name, abandon_on_cancel=True, limiter=import_limiter())
    return known
