"""Removing sequences that nobody goes on with: one task a server looks at all of them from time to time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
import trio

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ovmstrio.runtimes.models.sequences.manager import Sequence, SequenceManager

__all__ = ["clean_sequences", "scan"]

log = structlog.get_logger(__name__)

_MINUTE: Final = 60
_PORTION: Final = 500
"""How many sequences are looked at, or removed, before requests have their turn again: below a millisecond."""


def scan(managers: Iterable[SequenceManager]) -> int:
    """Remove the sequences that no request of theirs has succeeded in since the scan before; count them."""
    return sum(_portions(managers))


def _portions(managers: Iterable[SequenceManager]) -> Iterator[int]:
    """Scan a portion at each step, and count what was removed in it; requests may run in between."""
    # What is there at the beginning is looked at once, whichever manager it moves to meanwhile.
    found = [(manager, list(manager)) for manager in managers if manager.cleaned]
    for manager, sequences in found:
        total = 0
        while sequences:
            removed = sum(map(_is_over, sequences[-_PORTION:]))
            # To let go of all states at once, at the end, would take as long as all the rest.
            del sequences[-_PORTION:]
            total += removed
            yield removed
        if total:
            log.info("idle sequences removed", model=manager.name, version=manager.version, sequences=total)


def _is_over(sequence: Sequence) -> bool:
    """End a sequence that was idle at the last scan already, and mark one that is now; a busy one is passed over."""
    if sequence.is_busy or not sequence.alive:
        return False
    over = sequence.idle
    if over:
        sequence.owner.remove(sequence)
    sequence.idle = True
    return over


async def clean_sequences(managers: Iterable[SequenceManager], minutes: int) -> None:
    """Scan every so many minutes, for ever; with 0 minutes return at once.

    An idle sequence is removed between one and two periods after its last request.

    Cancellation: at any checkpoint; nothing is held.
    """
    while minutes:
        await trio.sleep(minutes * _MINUTE)
        for _ in _portions(managers):
            await trio.lowlevel.checkpoint()
