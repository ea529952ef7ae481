"""What Python's cyclic collector is spared once everything is loaded."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ovmstrio.registry import Registry

__all__ = ["collect_rarely", "spare_the_collector"]

_OBJECTS_A_COLLECTION: Final = 20_000
"""How many objects may come before the youngest are looked at; a call makes a few dozen, few of them in cycles."""


def collect_rarely() -> None:
    """Have the collector look at new objects less often: imports make hundreds of thousands, and nearly all stay."""
    gc.set_threshold(_OBJECTS_A_COLLECTION, 20, 20)


async def spare_the_collector(registry: Registry) -> None:
    """Keep the collector from what was loaded at the start, and from looking at every few calls.

    By default it takes a tenth to a fifth of the time of a small call.

    Cancellation: until the first load has ended; nothing is changed then.
    """
    await registry.wait_loaded()
    gc.collect()
    gc.freeze()
    collect_rarely()
