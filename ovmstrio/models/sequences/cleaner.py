"""Removing sequences that nobody goes on with: one task a server looks at all of them from time to time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
import trio

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ovmstrio.models.sequences.manager import SequenceManager

__all__ = ["clean_sequences", "scan"]

log = structlog.get_logger(__name__)

_MINUTE: Final = 60


def scan(managers: Iterable[SequenceManager]) -> int:
    """Remove the sequences that no request of theirs has succeeded in since the scan before; count them."""
    total = 0
    for manager in managers:
        removed = manager.remove_idle() if manager.cleaned else 0
        if removed:
            log.info("idle sequences removed", model=manager.name, version=manager.version, sequences=removed)
        total += removed
    return total


async def clean_sequences(managers: Iterable[SequenceManager], minutes: int) -> None:
    """Scan every so many minutes, for ever; with 0 minutes return at once.

    An idle sequence is removed between one and two periods after its last request.

    Cancellation: at any checkpoint; nothing is held.
    """
    while minutes:
        await trio.sleep(minutes * _MINUTE)
        scan(managers)
