"""Sequences in a file: from the end of one server to the start of the next, and for one that is killed.

::

    requests ─> SequenceChanges ── every half of the time ──> segments ── thread ──> end of the file
                                                          └ all sequences: a new file in its place, from time to time

What has succeeded is in the file after ``seconds`` at most.  A server that drains writes all there is, and says so; one
that ends otherwise leaves a file from which the steps of its last seconds may be missing.
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
from contextlib import contextmanager, suppress
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

from ovmstrio.core.errors import ConfigError, Problem, TooManySequences
from ovmstrio.core.tensor import BY_NAME, Dim, TensorSpec
from ovmstrio.core.worker_peers import SequenceElsewhere
from ovmstrio.encoding.raw_contents import buffer_of
from ovmstrio.models.sequences.manager import Sequence, SequenceChanges
from ovmstrio.util.regular_files import open_regular, read_regular_bytes

if TYPE_CHECKING:
    from ovmstrio.core.request import Buffer
    from ovmstrio.inference.tensors import State
    from ovmstrio.models.sequences.manager import SequenceManager, SequenceManagers

__all__ = [
    "LOCK_FILE",
    "STORE_FILE",
    "DamagedStore",
    "Segment",
    "SequenceStore",
    "StoredSegments",
    "check_store",
    "fill",
    "kept_counts",
    "locked_folder",
    "part_of_store",
    "read_segments",
]

# ----------------------------------------------------------------------
# The lock of a folder that one server at a time may keep its sequences in
# ----------------------------------------------------------------------

LOCK_FILE: Final = "sequences.lock"
_OPTION: Final = "--sequence_store"


@contextmanager
def locked_folder(folder: Path, configuration: str) -> Iterator[None]:
    """Keep other servers, of this process as well, out of a folder while the block lasts; makes the folder.

    Args:
        folder: of the sequences.
        configuration: what the server serves, for those that are refused.

    Raises:
        ConfigError: another server has it, which is named; or it cannot be written.
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
            raise ConfigError([_taken(folder, file.read())]) from None
        except OSError as error:
            problem = Problem("the folder cannot be locked", path=_OPTION, found=f"{folder}: {error.strerror}")
            raise ConfigError([problem]) from None
        file.truncate(0)
        json.dump(_owner(configuration), file)
        file.flush()
        try:
            yield
        finally:
            # It stays, as another server may wait for this very file; it says nothing any more.
            os.ftruncate(descriptor, 0)


def _owner(configuration: str) -> dict[str, Any]:
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": started, "configuration": configuration}


def _taken(folder: Path, written: str) -> Problem:
    try:
        owner = json.loads(written)
        found = f"process {owner['pid']} on {owner['host']}, since {owner['started']}, serving {owner['configuration']}"
    except (ValueError, LookupError, TypeError):
        found = "a server that has not said its name yet"
    return Problem(
        f"another server keeps its sequences in {folder}",
        path=_OPTION,
        expected="a folder that no other server has",
        found=found,
        suggestion="stop that server first, or give this one another folder; if it is gone already, a process that"
        f" it has started still holds {folder / LOCK_FILE}",
    )


# ----------------------------------------------------------------------
# Sequences as bytes that can be told from damaged ones
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

_MAGIC: Final = b"OVMTRSEQ"
_VERSION: Final = 2
_HEAD: Final = Struct("<8sIQ32s")
_LENGTH: Final = Struct("<Q")

Index = dict[str, Any]


class DamagedStore(Exception):
    """Bytes are not those of sequences, or not all of them."""


@dataclass(slots=True)
class Segment:
    """What becomes of some sequences, before it is bytes; values are views of states, which never change.

    Attributes:
        written_at: the time on the wall.
        lost_seconds: of how long steps may be missing in what is written so far; 0 at the end of a server.
        dropped: models, by name and version, of which nothing counts that was written before.
    """

    written_at: float
    lost_seconds: float = 0.0
    dropped: list[tuple[str, int]] = field(default_factory=list)
    _managers: dict[SequenceManager, tuple[Index, list[Buffer]]] = field(default_factory=dict)

    def add(self, manager: SequenceManager, number: int | str, sequence: Sequence | None) -> None:
        """Write down what a manager has for an id now: a sequence, or none; one without a state is none."""
        entry, values = self.mention(manager)
        if sequence is None or sequence.state is None:
            entry["gone"].append(number)
        else:
            entry["sequences"].append(_sequence_entry(sequence, sequence.state, manager.variables, values))

    def mention(self, manager: SequenceManager) -> tuple[Index, list[Buffer]]:
        """Write down a manager, and give its entry and the values of its sequences."""
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
        """Give the bytes in pieces; states are not copied."""
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
        "by_default": sequence.by_default,
        "shapes": [array.shape for array in arrays],
    }


class StoredSegments(NamedTuple):
    """What a file says: an index and values of each segment, and how many bytes at its end are no whole segment."""

    segments: list[tuple[Index, memoryview]]
    torn_bytes: int

    @property
    def written_at(self) -> float:
        """The time on the wall of the last segment."""
        return float(self.segments[-1][0]["written_at"])

    @property
    def lost_seconds(self) -> float:
        """Of how long steps may be missing: those that were made after the last segment."""
        return float(self.segments[-1][0]["lost_seconds"])


def read_segments(content: bytes) -> StoredSegments:
    """Check a file and take it apart, up to the first segment that is not whole, such as one whose writer was killed.

    Raises:
        DamagedStore: not even the first segment is whole; or the file is something else, or of another version.
    """
    rest = memoryview(content)
    segments: list[tuple[Index, memoryview]] = []
    while rest:
        try:
            index, values, rest = _decode(rest)
        except DamagedStore:
            if not segments:
                raise
            break
        segments.append((index, values))
    if not segments:
        raise DamagedStore("the file is empty")
    return StoredSegments(segments, len(rest))


def _decode(content: memoryview) -> tuple[Index, memoryview, memoryview]:
    if len(content) < _HEAD.size + _LENGTH.size:
        raise DamagedStore(f"the file has {len(content)} bytes only")
    magic, version, size, digest = _HEAD.unpack_from(content)
    if magic != _MAGIC:
        raise DamagedStore("the file does not hold sequences")
    if version != _VERSION:
        raise DamagedStore(f"the file has version {version} of the format, and this server reads version {_VERSION}")
    end = _HEAD.size + size
    rest = content[_HEAD.size : end]
    if len(rest) < size or hashlib.sha256(rest).digest() != digest:
        raise DamagedStore("the checksum does not fit the content: the file is damaged or not whole")
    (length,) = _LENGTH.unpack_from(rest)
    index: Index = orjson.loads(rest[_LENGTH.size : _LENGTH.size + length])
    return index, rest[_LENGTH.size + length :], content[end:]


class _Stored(NamedTuple):
    """A sequence in a file: its entry, its values, and when they were written."""

    entry: Index
    values: memoryview
    written_at: float


@dataclass(slots=True)
class _StoredManager:
    """What a file says of one version of a model in the end."""

    variables: tuple[TensorSpec, ...]
    next_id: int = 1
    sequences: dict[int | str, _Stored] = field(default_factory=dict)


def fill(managers: SequenceManagers, stored: StoredSegments, *, now: float) -> int:
    """Put what a file says into managers, which wait for their models to be loaded; count the sequences.

    ``now`` is the time on the wall: what passed since a sequence was written counts as idle.
    """
    count = without_room = 0
    for (name, version), found in _replayed(stored).items():
        manager = managers.add(name, version, found.variables)
        manager.next_id = found.next_id
        for entry, values, written_at in found.sequences.values():
            begin = trio.current_time() - max(0.0, now - written_at)
            sequence = Sequence(entry["id"], manager, by_default=entry["by_default"])
            sequence.started_at, sequence.used_at = begin - entry["age"], begin - entry["idle_seconds"]
            sequence.requests, sequence.idle = entry["requests"], entry["idle"]
            sequence.lost_seconds = stored.lost_seconds
            sequence.state = _state(found.variables, entry["shapes"], values)
            try:
                # One that was ended just before its server was killed may be another process's now.
                with suppress(SequenceElsewhere):
                    manager.take(sequence)
                    count += 1
            except TooManySequences:
                without_room += 1
    if without_room:
        log.error("sequences not restored", reason="max_sequence_number was larger before", sequences=without_room)
    return count


def _replayed(stored: StoredSegments) -> dict[tuple[str, int], _StoredManager]:
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
    """Count the bytes of a variable's value."""
    return prod(shape) * variable.datatype.itemsize


def _state(variables: Many[TensorSpec], shapes: Many[Many[int]], values: memoryview) -> State:
    state = {}
    offset = 0
    for variable, shape in zip(variables, shapes, strict=True):
        end = offset + _size(variable, shape)
        # A copy is aligned, and does not keep the whole file in memory.
        packed = np.frombuffer(bytes(values[offset:end]), variable.datatype.numpy)
        state[variable.name] = packed.reshape(tuple(shape))
        offset = end
    return state


# ----------------------------------------------------------------------
# Sequences in a file: from the end of one server to the start of the next, and for one that is killed
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# Parts of a sequence store: the folder of each worker process
# ----------------------------------------------------------------------

_PART: Final = re.compile(r"worker-[0-9]+-of-([0-9]+)")


def part_of_store(folder: Path, row: int, rows: int) -> Path:
    """Return the folder of worker ``row`` of ``rows``."""
    return folder / f"worker-{row}-of-{rows}"


def kept_counts(folder: Path) -> list[int]:
    """Return the numbers of worker processes whose sequences a folder holds, sorted."""
    kept = {1} if (folder / STORE_FILE).exists() else set()
    for file in folder.glob(f"worker-*/{STORE_FILE}"):
        if match := _PART.fullmatch(file.parent.name):
            kept.add(int(match[1]))
    return sorted(kept)


def check_store(folder: Path, rows: int) -> None:
    """Check that the sequences in a folder belong to ``rows`` worker processes.

    Raises:
        ConfigError: they belong to another number of processes, and would be lost.
    """
    others = [count for count in kept_counts(folder) if count != rows]
    if others:
        counts = " and ".join(map(str, others))
        problem = Problem(
            f"{folder} has sequences of a server of {counts} workers",
            path="--sequence_store",
            expected=f"those of {rows}, or none",
            suggestion=f"start with --workers {others[0]}, give another folder, or remove {folder / STORE_FILE}"
            " and the folders worker-* beside it, if nobody goes on with them",
        )
        raise ConfigError([problem])
