"""Imports on first use, in a thread."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

import trio


async def import_aside(name: str) -> ModuleType:
    """Return a module; import it in a thread if needed, so that the event loop keeps running.

    Raises:
        ImportError: the module cannot be imported.

    Cancellation: at once; the import continues in its thread and takes effect.
    """
    known = sys.modules.get(name)
    if known is None or getattr(known.__spec__, "_initializing", False):
        return await trio.to_thread.run_sync(import_module, name, abandon_on_cancel=True)
    return known
