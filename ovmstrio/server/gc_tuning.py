"""Thresholds of the garbage collector, and freezing of objects that live as long as the process."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ovmstrio.serving.registry import Registry

_SERVING_GC_THRESHOLD: Final = 20_000
"""Threshold of the youngest generation; a call creates a few dozen objects, few of them in cycles."""
_IMPORT_GC_THRESHOLD: Final = 200_000
"""Threshold while importing: nearly all imported objects stay."""


def raise_gc_threshold() -> None:
    """Raise the collector threshold during imports, until :func:`set_serving_gc_threshold`."""
    gc.set_threshold(_IMPORT_GC_THRESHOLD, 20, 20)


def set_serving_gc_threshold() -> None:
    """Raise the collector threshold for serving."""
    gc.set_threshold(_SERVING_GC_THRESHOLD, 20, 20)


def freeze_imports() -> None:
    """Freeze the collector's objects in a process that has only imported modules.

    About 1 MB of them is garbage, which would take nearly 100 ms to find.
    """
    gc.freeze()


async def freeze_gc(registry: Registry) -> None:
    """Freeze the objects of the start and raise the threshold after the first load.

    The default thresholds cost 10 to 20 % of a small call.  Objects before the load are frozen without a collection,
    because few are garbage, so that the collection after the load is short.

    Cancellation: objects before the load stay frozen.
    """
    if not registry.has_loaded:
        gc.freeze()
        await registry.wait_loaded()
    gc.collect()
    gc.freeze()
    set_serving_gc_threshold()
