"""Modules that are imported when they are first needed, beside what the event loop has to do."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

import trio


async def import_aside(name: str) -> ModuleType:
    """Give a module; one that is not there is imported in a thread, so that the loop goes on meanwhile.

    Raises:
        ImportError: it cannot be imported.

    Cancellation: at once; the import goes on in its thread, and counts.
    """
    known = sys.modules.get(name)
    if known is None or getattr(known.__spec__, "_initializing", False):
        return await trio.to_thread.run_sync(import_module, name, abandon_on_cancel=True)
    return known
