"""Persistent sequence store: restores sequences after a restart, and most steps after a kill.

::

    requests ─> SequenceChanges ── each seconds/2 ──> segments ── thread ──> appended to the file
                                                   └ all sequences: a new file, from time to time

A successful step is in the file after at most ``seconds``. A drained server writes all sequences; a killed one may lose
the steps of its last seconds.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import TextIOWrapper
from itertools import islice
from math import prod
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import orjson
import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import BY_NAME, Dim, TensorSpec
from ovmstrio.encoding.raw_contents import buffer_of
from ovmstrio.models.sequences.manager import Sequence, SequenceChanges
from ovmstrio.util.regular_files import open_regular, read_regular_bytes

if TYPE_CHECKING:
    from ovmstrio.core.request import Buffer
    from ovmstrio.inference.tensors import State
    from ovmstrio.models.sequences.manager import SequenceManager, SequenceManagers

LOCK_FILE: Final = "sequences.lock"
_OPTION: Final = "--sequence-store"


@contextmanager
def lock_folder(folder: Path, configuration: str) -> Iterator[None]:
    """Create and lock a folder against other servers, also of this process, during the block.

    ``configuration`` is shown to a server that finds the folder locked.

    Raises:
        ConfigError: another server has the lock, or the folder cannot be written.
    """
    path = folder / LOCK_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = open_regular(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        problem = Problem("the folder cannot be written", path=_OPTION, found=f"{folder}: {error.strerror}")
        raise ConfigError([problem]) from None
    with TextIOWrapper(opened, encoding="utf-8") as file:
        descriptor = file.fileno()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError([_locked_problem(folder, file.read())]) from None
        except OSError as error:
            problem = Problem("the folder cannot be locked", path=_OPTION, found=f"{folder}: {error.strerror}")
            raise ConfigError([problem]) from None
        file.truncate(0)
        json.dump(_lock_owner(configuration), file)
        file.flush()
        try:
            yield
        finally:
            # Emptied, not removed: another server may have opened the file to lock it.
            os.ftruncate(descriptor, 0)


def _lock_owner(configuration: str) -> dict[str, Any]:
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": started, "configuration": configuration}


def _locked_problem(folder: Path, written: str) -> Problem:
    try:
        owner = json.loads(written)
        found = f"process {owner['pid']} on {owner['host']}, since {owner['started']}, serving {owner['configuration']}"
    except (ValueError, LookupError, TypeError):
        found = "a server that is starting"
    return Problem(
        f"another server uses the folder {folder}",
        path=_OPTION,
        expected="an unused folder",
        found=found,
        suggestion="stop that server, or set another folder; if that server has exited, one of its child processes"
        f" still holds {folder / LOCK_FILE}",
    )


# Segment format

log = structlog.get_logger(__name__)

_MAGIC: Final = b"OVMTRSEQ"
_VERSION: Final = 2
_HEAD: Final = Struct("<8sIQ32s")
_LENGTH: Final = Struct("<Q")

Index = dict[str, Any]


class CorruptStore(Exception):
    """The bytes are not a valid sequence file."""


@dataclass(slots=True)
class Segment:
    """Changes of sequences before encoding; values are views of states, which are immutable.

    Attributes:
        written_at: wall-clock time.
        lost_seconds: maximum age of steps missing from the file; 0 after a drain.
        dropped: models by name and version whose earlier entries are void.
    """

    written_at: float
    lost_seconds: float = 0.0
    dropped: list[tuple[str, int]] = field(default_factory=list)
    _managers: dict[SequenceManager, tuple[Index, list[Buffer]]] = field(default_factory=dict)

    def add(self, manager: SequenceManager, number: int | str, sequence: Sequence | None) -> None:
        """Add the current value of an id; None, or a sequence without state, removes the id."""
        entry, values = self.manager_entry(manager)
        if sequence is None or sequence.state is None:
            entry["gone"].append(number)
        else:
            entry["sequences"].append(_sequence_entry(sequence, sequence.state, manager.variables, values))

    def manager_entry(self, manager: SequenceManager) -> tuple[Index, list[Buffer]]:
        """Return the entry of a manager and the values of its sequences; create it if necessary."""
        found = self._managers.get(manager)
        if found is None:
            variables = [[each.name, each.datatype.name, list(map(list, each.shape))] for each in manager.variables]
            found = self._managers[manager] = (
                {
                    "name": manager.name,
                    "version": manager.version,
                    "next_id": manager.next_id,
                    "variables": variables,
                    "gone": [],
                    "sequences": [],
                },
                [],
            )
        return found

    def encode(self) -> list[Buffer]:
        """Return the segment as a list of buffers; states are not copied."""
        index = orjson.dumps(
            {
                "written_at": self.written_at,
                "lost_seconds": self.lost_seconds,
                "dropped": self.dropped,
                "managers": [entry for entry, _ in self._managers.values()],
            }
        )
        values = (value for _, values in self._managers.values() for value in values)
        rest = [_LENGTH.pack(len(index)), index, *values]
        digest = hashlib.sha256()
        for piece in rest:
            digest.update(piece)
        return [_HEAD.pack(_MAGIC, _VERSION, sum(map(len, rest)), digest.digest()), *rest]


def _sequence_entry(sequence: Sequence, state: State, variables: Many[TensorSpec], values: list[Buffer]) -> Index:
    arrays = [state[variable.name] for variable in variables]
    values.extend(map(buffer_of, arrays))
    info = sequence.info
    return {
        "id": info.id,
        "age": info.age_seconds,
        "idle_seconds": info.idle_seconds,
        "requests": info.requests,
        "idle": sequence.idle,
        "by_default": sequence.is_default_version,
        "lost_seconds": sequence.lost_seconds,
        "shapes": [array.shape for array in arrays],
    }


class StoredSegments(NamedTuple):
    """Decoded file: index and values of each segment, and the size of an incomplete last segment."""

    segments: list[tuple[Index, memoryview]]
    torn_bytes: int

    @property
    def written_at(self) -> float:
        """Wall-clock time of the last segment."""
        return float(self.segments[-1][0]["written_at"])

    @property
    def lost_seconds(self) -> float:
        """Maximum age of steps missing after the last segment."""
        return float(self.segments[-1][0]["lost_seconds"])


def read_segments(content: bytes) -> StoredSegments:
    """Decode a file up to the first incomplete segment, whose writer was killed.

    Raises:
        CorruptStore: the first segment is incomplete, or the file has another format or version.
    """
    rest = memoryview(content)
    segments: list[tuple[Index, memoryview]] = []
    while rest:
        try:
            index, values, rest = _decode(rest)
        except CorruptStore:
            if not segments:
                raise
            break
        segments.append((index, values))
    if not segments:
        raise CorruptStore("the file is empty")
    return StoredSegments(segments, len(rest))


def _decode(content: memoryview) -> tuple[Index, memoryview, memoryview]:
    if len(content) < _HEAD.size + _LENGTH.size:
        raise CorruptStore(f"the file has only {len(content)} bytes")
    magic, version, size, digest = _HEAD.unpack_from(content)
    if magic != _MAGIC:
        raise CorruptStore("not a sequence file")
    if version != _VERSION:
        raise CorruptStore(f"unsupported format version {version}, expected {_VERSION}")
    end = _HEAD.size + size
    rest = content[_HEAD.size : end]
    if len(rest) < size or hashlib.sha256(rest).digest() != digest:
        raise CorruptStore("checksum mismatch: the file is damaged or incomplete")
    (length,) = _LENGTH.unpack_from(rest)
    index: Index = orjson.loads(rest[_LENGTH.size : _LENGTH.size + length])
    return index, rest[_LENGTH.size + length :], content[end:]


class _Stored(NamedTuple):
    entry: Index
    values: memoryview
    written_at: float


@dataclass(slots=True)
class _StoredManager:
    variables: tuple[TensorSpec, ...]
    next_id: int = 1
    sequences: dict[int | str, _Stored] = field(default_factory=dict)


def restore_sequences(
    managers: SequenceManagers, stored: StoredSegments, *, now: float, is_strict: bool = False
) -> int:
    """Restore sequences into managers, whose models are loaded later; return their number.

    A sequence is complete if a drained server has written it last, and it was complete there. After a kill none is
    known to be: a step may have followed the last write.

    Args:
        managers: managers to fill.
        stored: contents of the file.
        now: wall-clock time; the time since the file was written counts as idle.
        is_strict: refuse the next step of sequences that may be incomplete.
    """
    count = others = 0
    owners = managers.owners
    for (name, version), found in _replay(stored).items():
        manager = managers.add(name, version, found.variables)
        manager.next_id = found.next_id
        for entry, values, written_at in found.sequences.values():
            if owners is not None and owners.owner(name, entry["id"]) is not None:
                others += 1
                continue
            begin = trio.current_time() - max(0.0, now - written_at)
            sequence = Sequence(entry["id"], manager, is_default_version=entry["by_default"])
            sequence.started_at, sequence.used_at = begin - entry["age"], begin - entry["idle_seconds"]
            sequence.requests, sequence.idle = entry["requests"], entry["idle"]
            # Files of earlier releases do not have it.
            sequence.lost_seconds = max(stored.lost_seconds, entry.get("lost_seconds", 0.0))
            sequence.is_refused = is_strict and sequence.lost_seconds > 0
            sequence.state = _decode_state(found.variables, entry["shapes"], values)
            manager.take(sequence)
            count += 1
    if others:
        reason = "their ids belong to other workers: stored by an earlier release"
        log.error("sequences not restored", reason=reason, sequences=others)
    return count


def _replay(stored: StoredSegments) -> dict[tuple[str, int], _StoredManager]:
    found: dict[tuple[str, int], _StoredManager] = {}
    for index, values in stored.segments:
        for name, version in index["dropped"]:
            found.pop((name, version), None)
        offset = 0
        for entry in index["managers"]:
            variables = tuple(_variable(*each) for each in entry["variables"])
            manager = found.setdefault((entry["name"], entry["version"]), _StoredManager(variables))
            manager.next_id = entry["next_id"]
            for number in entry["gone"]:
                manager.sequences.pop(number, None)
            for each in entry["sequences"]:
                end = offset + sum(map(_size, variables, each["shapes"]))
                manager.sequences[each["id"]] = _Stored(each, values[offset:end], index["written_at"])
                offset = end
    return found


def _variable(name: str, datatype: str, dims: list[list[int]]) -> TensorSpec:
    return TensorSpec(name, BY_NAME[datatype], tuple(Dim(low, high) for low, high in dims), None)


def _size(variable: TensorSpec, shape: Iterable[int]) -> int:
    return prod(shape) * variable.datatype.itemsize


def _decode_state(variables: Many[TensorSpec], shapes: Many[Many[int]], values: memoryview) -> State:
    state = {}
    offset = 0
    for variable, shape in zip(variables, shapes, strict=True):
        end = offset + _size(variable, shape)
        # Copied: aligned, and does not keep the file content in memory.
        packed = np.frombuffer(bytes(values[offset:end]), variable.datatype.numpy)
        state[variable.name] = packed.reshape(tuple(shape))
        offset = end
    return state


# Store

STORE_FILE: Final = "sequences.bin"
_UNFINISHED: Final = "sequences.bin.new"
_DAMAGED: Final = "sequences.bin.damaged"

_PORTION: Final = 200
"""Sequences of a segment, encoded between checkpoints in less than 1 ms."""
_SMALL_BYTES: Final = 2**20
"""A file may always grow by this size before it is rewritten."""

_Item = tuple["SequenceManager", int | str, "Sequence | None"]


class SequenceStore:
    """Store of a server's sequences in an existing, exclusively locked folder.

    A killed server loses the steps of at most ``seconds``; 0 writes only on shutdown. With ``is_strict`` the next step
    of a sequence is refused if steps may be lost.
    """

    def __init__(self, managers: SequenceManagers, folder: Path, seconds: float, *, is_strict: bool = True) -> None:
        self._managers = managers
        self._changes = managers.changes = SequenceChanges()
        self._folder = folder
        self._seconds = seconds
        self._is_strict = is_strict
        self._lock = trio.Lock()
        self._is_restored = False
        # Whether the file is complete, so that segments can be appended.
        self._is_complete = False
        self._has_failed = False
        self._file_bytes = self._appended_bytes = 0

    async def restore(self) -> None:
        """Read the file, before any model is loaded; a damaged or unreadable file is logged and renamed.

        Afterwards the file states that its server is running.
        """
        async with self._lock:
            try:
                stored = await trio.to_thread.run_sync(_read, self._folder / STORE_FILE)
            except (OSError, CorruptStore) as error:
                await self._rename_damaged(error)
                stored = None
            if stored is not None:
                self._restore_managers(stored)
            self._is_restored = True
            if self._seconds:
                await self._save()
            elif stored is not None:
                # Nothing is written before shutdown, and the file would be outdated after a kill.
                (self._folder / STORE_FILE).unlink()

    async def _rename_damaged(self, error: Exception) -> None:
        path, aside = self._folder / STORE_FILE, self._folder / _DAMAGED
        log.error("sequences not restored", file=str(path), reason=str(error), kept=str(aside))
        try:
            await trio.to_thread.run_sync(path.replace, aside)
        except OSError as problem:
            log.error("damaged sequence file not renamed", file=str(path), reason=str(problem))  # noqa: TRY400 - expected

    def _restore_managers(self, stored: StoredSegments) -> None:
        now = time.time()
        count = restore_sequences(self._managers, stored, now=now, is_strict=self._is_strict)
        log.info(
            "sequences restored",
            folder=str(self._folder),
            sequences=count,
            written_seconds_ago=round(now - stored.written_at, 3),
            lost_seconds=stored.lost_seconds,
        )
        if stored.torn_bytes:
            log.warning("sequence file truncated", ignored_bytes=stored.torn_bytes)

    async def run(self) -> None:
        """Write changes every ``seconds / 2`` until cancelled; failures are logged and retried."""
        while self._seconds:
            await trio.sleep(self._seconds / 2)
            async with self._lock:
                if self._is_restored and (self._changes or self._has_failed):
                    await self._save()

    async def save(self) -> bool:
        """Write changes; return False after a failure, which is logged if the previous write succeeded."""
        async with self._lock:
            return await self._save()

    async def save_at_end(self) -> bool:
        """Write all sequences after the last request; return False after a failure, which keeps the old file.

        Cancellation: shielded, for the time to write the file.
        """
        with trio.CancelScope(shield=True):
            async with self._lock:
                if not self._is_restored:
                    return True
                saved = await self._save(is_end=True)
                # Closing a model from now on must not end its sequences in the next run.
                self._is_restored = False
        if saved:
            count = sum(map(len, self._managers))
            log.info("sequences saved", folder=str(self._folder), sequences=count)
        return saved

    async def _save(self, *, is_end: bool = False) -> bool:
        changes = self._changes.take()
        is_rewrite = is_end or not self._is_complete or self._appended_bytes > max(self._file_bytes, _SMALL_BYTES)
        # Until the write succeeds: the returned changes are in no file.
        self._is_complete = False
        segments = await self._create_segments(changes, 0.0 if is_end else self._seconds, is_rewrite=is_rewrite)
        try:
            size = await trio.to_thread.run_sync(_rewrite if is_rewrite else _append, self._folder, segments)
        except OSError as error:
            if is_end or not self._has_failed:
                log.error("sequences not saved", folder=str(self._folder), reason=str(error))  # noqa: TRY400 - expected
            self._has_failed = True
            return False
        self._record_write(size, is_rewrite=is_rewrite)
        return True

    async def _create_segments(
        self, changes: SequenceChanges, lost_seconds: float, *, is_rewrite: bool
    ) -> list[Segment]:
        first = Segment(time.time(), lost_seconds, [] if is_rewrite else sorted(changes.dropped))
        segments = [first]
        if is_rewrite:
            for manager in self._managers:
                first.manager_entry(manager)
        items: Iterator[_Item] = (
            _all_items(self._managers)
            if is_rewrite
            else ((manager, number, sequence) for (manager, number), sequence in changes.changed.items())
        )
        while portion := list(islice(items, _PORTION)):
            for manager, number, sequence in portion:
                if self._managers.is_current(manager):
                    segments[-1].add(manager, number, sequence)
            await trio.lowlevel.checkpoint()
            segments.append(Segment(time.time(), lost_seconds))
        return segments if len(segments) == 1 else segments[:-1]

    def _record_write(self, size: int, *, is_rewrite: bool) -> None:
        self._is_complete = True
        if self._has_failed:
            self._has_failed = False
            log.info("sequence saving recovered", folder=str(self._folder))
        if is_rewrite:
            self._file_bytes, self._appended_bytes = size, 0
        else:
            self._appended_bytes += size


def _all_items(managers: SequenceManagers) -> Iterator[_Item]:
    # A snapshot: each sequence is written once; the next segment records moves to other managers.
    there = [(manager, tuple(manager)) for manager in managers]
    return ((manager, sequence.id, sequence) for manager, sequences in there for sequence in sequences)


def _read(path: Path) -> StoredSegments | None:
    try:
        content = read_regular_bytes(path, max_bytes=None)
    except FileNotFoundError:
        return None
    return read_segments(content)


def _rewrite(folder: Path, segments: Iterable[Segment]) -> int:
    """Replace the file atomically; the old file stays after a failure."""
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
    """Append segments; truncate the file to its old size after a failure."""
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


# Folders of workers

_PART: Final = re.compile(r"worker-[0-9]+-of-([0-9]+)")


def worker_folder(folder: Path, row: int, rows: int) -> Path:
    """Return the folder of worker ``row`` of ``rows``."""
    return folder / f"worker-{row}-of-{rows}"


def stored_worker_counts(folder: Path) -> list[int]:
    """Return the sorted worker counts for which a folder contains sequences."""
    kept = {1} if (folder / STORE_FILE).exists() else set()
    for file in folder.glob(f"worker-*/{STORE_FILE}"):
        if match := _PART.fullmatch(file.parent.name):
            kept.add(int(match[1]))
    return sorted(kept)


def check_worker_count(folder: Path, rows: int) -> None:
    """Check that the sequences in a folder belong to ``rows`` workers.

    Raises:
        ConfigError: the sequences belong to another number of workers, and would be lost.
    """
    others = [count for count in stored_worker_counts(folder) if count != rows]
    if others:
        counts = " and ".join(map(str, others))
        problem = Problem(
            f"{folder} contains sequences of a server with {counts} workers",
            path="--sequence-store",
            expected=f"{rows} workers, or no sequences",
            suggestion=f"start with --workers {others[0]}, set another folder, or remove {folder / STORE_FILE}"
            " and the folders worker-* to discard the sequences",
        )
        raise ConfigError([problem])
