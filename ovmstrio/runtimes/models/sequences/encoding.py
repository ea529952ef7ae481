"""Sequences as bytes that can be told from damaged ones.

::

    magic (8 bytes) │ version (uint32) │ SHA-256 of the rest (32 bytes) │ length of the index (uint64) │ index │ values
                                                                          index: JSON; values: packed, as the index says

Numbers are little-endian; times are seconds before the file was written, and the time of that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from collections.abc import Sequence as Many
from math import prod
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson
import trio

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.tensor import Dim, TensorSpec
from ovmstrio.runtimes.models.buffers import buffer_of
from ovmstrio.runtimes.models.sequences.manager import Sequence

if TYPE_CHECKING:
    from ovmstrio.core.request import Buffer
    from ovmstrio.openvino.model_state import State
    from ovmstrio.runtimes.models.sequences.manager import SequenceManager
    from ovmstrio.runtimes.models.sequences.managers import SequenceManagers

__all__ = ["DamagedStore", "decode", "encode", "fill"]

_MAGIC: Final = b"OVMTRSEQ"
_VERSION: Final = 1
_HEAD: Final = Struct("<8sI32s")
_LENGTH: Final = Struct("<Q")

Index = dict[str, Any]


class DamagedStore(Exception):
    """Bytes are not those of sequences, or not all of them."""


def encode(managers: Iterable[SequenceManager], *, written_at: float) -> bytes:
    """Encode every sequence in which a request has succeeded; ``written_at`` is the time on the wall."""
    values: list[Buffer] = []
    entries = [_manager_entry(manager, values) for manager in managers]
    index = orjson.dumps({"written_at": written_at, "managers": entries})
    rest = b"".join([_LENGTH.pack(len(index)), index, *values])
    return _HEAD.pack(_MAGIC, _VERSION, hashlib.sha256(rest).digest()) + rest


def _manager_entry(manager: SequenceManager, values: list[Buffer]) -> Index:
    return {
        "name": manager.name,
        "version": manager.version,
        "next_id": manager.next_id,
        "variables": [[spec.name, spec.datatype.name, list(map(list, spec.shape))] for spec in manager.variables],
        "sequences": [
            _sequence_entry(sequence, sequence.state, manager.variables, values)
            for sequence in manager
            if sequence.state is not None
        ],
    }


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


def decode(content: bytes) -> tuple[Index, memoryview]:
    """Check what :func:`encode` gave; gives the index and the values.

    Raises:
        DamagedStore: it is something else, of another version of the format, or damaged.
    """
    if len(content) < _HEAD.size + _LENGTH.size:
        raise DamagedStore(f"the file has {len(content)} bytes only")
    magic, version, digest = _HEAD.unpack_from(content)
    if magic != _MAGIC:
        raise DamagedStore("the file does not hold sequences")
    if version != _VERSION:
        raise DamagedStore(f"the file has version {version} of the format, and this server reads version {_VERSION}")
    rest = memoryview(content)[_HEAD.size :]
    if hashlib.sha256(rest).digest() != digest:
        raise DamagedStore("the checksum does not fit the content: the file is damaged or not whole")
    (length,) = _LENGTH.unpack_from(rest)
    index: Index = orjson.loads(rest[_LENGTH.size : _LENGTH.size + length])
    return index, rest[_LENGTH.size + length :]


def fill(managers: SequenceManagers, index: Index, values: memoryview, *, now: float) -> int:
    """Put decoded sequences into managers, which wait for their models to be loaded; count the sequences.

    ``now`` is the time on the wall: what passed since the sequences were written counts as idle.
    """
    passed = max(0.0, now - index["written_at"])
    begin = trio.current_time() - passed
    offset = count = 0
    for entry in index["managers"]:
        variables = tuple(_variable(*each) for each in entry["variables"])
        manager = managers.add(entry["name"], entry["version"], variables)
        manager.next_id = entry["next_id"]
        for each in entry["sequences"]:
            sequence = Sequence(each["id"], manager, by_default=each["by_default"])
            sequence.started_at, sequence.used_at = begin - each["age"], begin - each["idle_seconds"]
            sequence.requests, sequence.idle = each["requests"], each["idle"]
            sequence.state, offset = _state(variables, each["shapes"], values, offset)
            manager.take(sequence)
            count += 1
    return count


def _variable(name: str, datatype: str, dims: list[list[int]]) -> TensorSpec:
    return TensorSpec(name, BY_NAME[datatype], tuple(Dim(low, high) for low, high in dims), None)


def _state(variables: Many[TensorSpec], shapes: Many[Many[int]], values: memoryview, offset: int) -> tuple[State, int]:
    state = {}
    for variable, shape in zip(variables, shapes, strict=True):
        size = prod(shape) * variable.datatype.itemsize
        # A copy is aligned, and does not keep the whole file in memory.
        packed = np.frombuffer(bytes(values[offset : offset + size]), variable.datatype.numpy)
        state[variable.name] = packed.reshape(tuple(shape))
        offset += size
    return state, offset
