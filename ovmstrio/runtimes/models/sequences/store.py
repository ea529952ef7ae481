"""Sequences in a file: from the end of one server to the start of the next, and for one that is killed.

::

    requests ─> SequenceChanges ── every half of the time ──> segments ── thread ──> end of the file
                                                          └ all sequences: a new file in its place, from time to time

What has succeeded is in the file after ``seconds`` at most.  A server that drains writes all there is, and says so; one
that ends otherwise leaves a file from which the steps of its last seconds may be missing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
import trio

from ovmstrio.runtimes.models.sequences.encoding import DamagedStore, Segment, StoredSegments, fill, read_segments
from ovmstrio.runtimes.models.sequences.manager import SequenceChanges
from ovmstrio.util.regular_files import open_regular, read_regular_bytes

if TYPE_CHECKING:
    from ovmstrio.runtimes.models.sequences.manager import Sequence, SequenceManager
    from ovmstrio.runtimes.models.sequences.managers import SequenceManagers

__all__ = ["STORE_FILE", "SequenceStore"]

log = structlog.get_logger(__name__)

STORE_FILE: Final = "sequences.bin"
_UNFINISHED: Final = "sequences.bin.new"
_DAMAGED: Final = "sequences.bin.damaged"

_PORTION: Final = 200
"""Sequences of a segment, which is made before requests have their turn again: below a millisecond."""
_SMALL_BYTES: Final = 2**20
"""What may be appended to however small a file."""

_Item = tuple["SequenceManager", int | str, "Sequence | None"]


class SequenceStore:
    """Keeps the sequences of a server in a folder that no other server has, see ``store_lock``.

    Args:
        managers: of all models; the store has them note what becomes of sequences from now on.
        folder: that exists.
        seconds: of how long steps may be lost by a server that is killed; 0 writes nothing before the end.
    """

    def __init__(self, managers: SequenceManagers, folder: Path, seconds: float) -> None:
        self._managers = managers
        self._changes = managers.changes = SequenceChanges()
        self._folder = folder
        self._seconds = seconds
        self._turn = trio.Lock()
        self._is_restored = False
        # Whether segments may be put behind what is there, which is all that there was to write.
        self._is_whole = False
        self._has_failed = False
        self._whole_bytes = self._appended_bytes = 0

    async def restore(self) -> None:
        """Read the file, to be done before any model is loaded; it stays, but says then that its server lives.

        Raises: nothing; a file that is damaged or cannot be read is logged and put aside.

        Cancellation: at once, with the file as it was.
        """
        async with self._turn:
            try:
                stored = await trio.to_thread.run_sync(_read, self._folder / STORE_FILE)
            except (OSError, DamagedStore) as error:
                await self._put_aside(error)
                stored = None
            if stored is not None:
                self._fill(stored)
            self._is_restored = True
            if self._seconds:
                await self._save()
            elif stored is not None:
                # Nothing is written before the end: what is there would be out of date by then.
                (self._folder / STORE_FILE).unlink()

    async def _put_aside(self, error: Exception) -> None:
        path, aside = self._folder / STORE_FILE, self._folder / _DAMAGED
        log.error("sequences not restored", file=str(path), reason=str(error), kept=str(aside))
        try:
            await trio.to_thread.run_sync(path.replace, aside)
        except OSError as problem:
            log.error("the file cannot be put aside", file=str(path), reason=str(problem))  # noqa: TRY400 - told

    def _fill(self, stored: StoredSegments) -> None:
        now = time.time()
        count = fill(self._managers, stored, now=now)
        log.info(
            "sequences restored",
            folder=str(self._folder),
            sequences=count,
            written_seconds_ago=round(now - stored.written_at, 3),
            lost_seconds=stored.lost_seconds,
        )
        if stored.torn_bytes:
            log.warning("the end of the sequences' file is not whole", bytes_left_out=stored.torn_bytes)

    async def run(self) -> None:
        """Write down what has changed, twice in the time of which steps may be lost, for ever.

        Raises: nothing; a failure is logged, the first time in a row, and everything is written anew the next time.

        Cancellation: while it sleeps, or between two portions of sequences; the file is whole up to its last segment.
        """
        while self._seconds:
            await trio.sleep(self._seconds / 2)
            async with self._turn:
                if self._is_restored and (self._changes or self._has_failed):
                    await self._save()

    async def save(self) -> bool:
        """Write what has changed; return False if that failed, which the log says for the first failure in a row.

        Cancellation: as of :meth:`run`.
        """
        async with self._turn:
            return await self._save()

    async def save_at_end(self) -> bool:
        """Write all sequences when no request runs any more; False if that failed, which leaves the file as it was.

        Cancellation: never; it is shielded, and takes as long as writing the file.
        """
        with trio.CancelScope(shield=True):
            async with self._turn:
                if not self._is_restored:
                    return True
                saved = await self._save(is_end=True)
                # What is closed from now on is not over for the next server.
                self._is_restored = False
                self._managers.hand_over()
        if saved:
            count = sum(map(len, self._managers))
            log.info("sequences saved", folder=str(self._folder), sequences=count)
        return saved

    async def _save(self, *, is_end: bool = False) -> bool:
        changes = self._changes.hand_out()
        anew = is_end or not self._is_whole or self._appended_bytes > max(self._whole_bytes, _SMALL_BYTES)
        # Until it has succeeded: what was handed out is in no file.
        self._is_whole = False
        segments = await self._make_segments(changes, 0.0 if is_end else self._seconds, anew=anew)
        try:
            size = await trio.to_thread.run_sync(_write_anew if anew else _append, self._folder, segments)
        except OSError as error:
            if is_end or not self._has_failed:
                log.error("sequences not saved", folder=str(self._folder), reason=str(error))  # noqa: TRY400 - told
            self._has_failed = True
            return False
        self._note_written(size, anew=anew)
        return True

    async def _make_segments(self, changes: SequenceChanges, lost_seconds: float, *, anew: bool) -> list[Segment]:
        first = Segment(time.time(), lost_seconds, [] if anew else sorted(changes.dropped))
        segments = [first]
        if anew:
            for manager in self._managers:
                first.mention(manager)
        items = _all_items(self._managers) if anew else _changed_items(changes)
        while portion := list(islice(items, _PORTION)):
            for manager, number, sequence in portion:
                if self._managers.has(manager):
                    segments[-1].add(manager, number, sequence)
            await trio.lowlevel.checkpoint()
            segments.append(Segment(time.time(), lost_seconds))
        return segments if len(segments) == 1 else segments[:-1]

    def _note_written(self, size: int, *, anew: bool) -> None:
        self._is_whole = True
        if self._has_failed:
            self._has_failed = False
            log.info("sequences saved again", folder=str(self._folder))
        if anew:
            self._whole_bytes, self._appended_bytes = size, 0
        else:
            self._appended_bytes += size


def _all_items(managers: SequenceManagers) -> Iterator[_Item]:
    # What is there now is written once, whichever manager it moves to meanwhile; the next segment says so.
    there = [(manager, tuple(manager)) for manager in managers]
    return ((manager, sequence.id, sequence) for manager, sequences in there for sequence in sequences)


def _changed_items(changes: SequenceChanges) -> Iterator[_Item]:
    return ((manager, number, sequence) for (manager, number), sequence in changes.touched.items())


def _read(path: Path) -> StoredSegments | None:
    try:
        content = read_regular_bytes(path, max_bytes=None)
    except FileNotFoundError:
        return None
    return read_segments(content)


def _write_anew(folder: Path, segments: Iterable[Segment]) -> int:
    """Put a file of these segments in the place of the one that is there, which stays if that fails."""
    unfinished = folder / _UNFINISHED
    try:
        size = _write(unfinished, os.O_TRUNC, segments)
        unfinished.replace(folder / STORE_FILE)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size


def _append(folder: Path, segments: Iterable[Segment]) -> int:
    """Put segments behind what is there, from which they are removed again if that fails."""
    path = folder / STORE_FILE
    size = path.stat().st_size
    try:
        return _write(path, os.O_APPEND, segments)
    except BaseException:
        os.truncate(path, size)
        raise


def _write(path: Path, mode: int, segments: Iterable[Segment]) -> int:
    size = 0
    with open_regular(path, os.O_WRONLY | os.O_CREAT | mode, 0o600) as file:
        for segment in segments:
            for piece in segment.encode():
                size += file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return size
