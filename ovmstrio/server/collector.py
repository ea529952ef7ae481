"""What Python's cyclic collector is spared while a server starts, and once everything is loaded."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ovmstrio.registry import Registry

__all__ = ["collect_rarely", "keep_imports", "spare_imports", "spare_the_collector"]

_OBJECTS_A_COLLECTION: Final = 20_000
"""How many objects may come before the youngest are looked at; a call makes a few dozen, few of them in cycles."""
_OBJECTS_OF_IMPORTS: Final = 200_000
"""How many may come before a process that begins looks at them: those that imports make, of which nearly all stay."""


def spare_imports() -> None:
    """Keep the collector from what imports make, until :func:`collect_rarely`."""
    gc.set_threshold(_OBJECTS_OF_IMPORTS, 20, 20)


def collect_rarely() -> None:
    """Have the collector look at new objects less often than by default."""
    gc.set_threshold(_OBJECTS_A_COLLECTION, 20, 20)


def keep_imports() -> None:
    """Keep the collector for ever from what there is, in a process that has imported things and done nothing else.

    About a megabyte of it is garbage, which would take nearly a tenth of a second to find.
    """
    gc.freeze()


async def spare_the_collector(registry: Registry) -> None:
    """Keep the collector from what was made at the start, and from looking at every few calls.

    By default it takes a tenth to a fifth of the time of a small call.  What is there while models load is looked
    through by then, as nobody waits for the event loop and OpenVINO goes on.

    Cancellation: until the first load has ended; what is there by now is spared all the same.
    """
    if not registry.has_loaded:
        _freeze()
        await registry.wait_loaded()
    _freeze()
    collect_rarely()


def _freeze() -> None:
    gc.collect()
    gc.freeze()
