"""Sequences as bytes that can be told from damaged ones.

A file is a row of segments.  Each says what has become of some sequences, and the last word on a sequence counts::

    magic (8 bytes) │ version (uint32) │ length of the rest (uint64) │ SHA-256 of the rest (32 bytes) │ rest
    rest: length of the index (uint64) │ index │ values
          index: JSON; values: packed, as the index says

Numbers are little-endian; times are seconds before the segment was written, and the time of that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from collections.abc import Sequence as Many
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import orjson
import structlog
import trio

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.errors import TooManySequences
from ovmstrio.core.sequence_owners import SequenceElsewhere
from ovmstrio.core.tensor import Dim, TensorSpec
from ovmstrio.runtimes.models.buffers import buffer_of
from ovmstrio.runtimes.models.sequences.manager import Sequence

if TYPE_CHECKING:
    from ovmstrio.core.request import Buffer
    from ovmstrio.openvino.model_state import State
    from ovmstrio.runtimes.models.sequences.manager import SequenceManager
    from ovmstrio.runtimes.models.sequences.managers import SequenceManagers

__all__ = ["DamagedStore", "Segment", "StoredSegments", "fill", "read_segments"]

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
