"""Parser of large JSON bodies that converts numbers to arrays without creating Python objects.

::

    head ─> simdjson ─┬─> names, shapes, parameters: Python objects
                      └─> data: LargeData ─> array(kind), or a list

The parser indexes the text in one pass and fills arrays in a second: a fifth of the time of a list of numbers.  It is
used only where it agrees with the general reader; everything that it refuses goes to the general reader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ovmstrio.core.request import Buffer
from ovmstrio.core.tensor import Array
from ovmstrio.encoding.number_arrays import NUMBER_DTYPES, PARSER_ERRORS, simdjson_module

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ovmstrio.encoding.number_arrays import NumberKind

LARGE_BYTES: Final = 4096
"""Minimum body size for which this parser is faster."""

_OPENING, _CLOSING, _BRACE = b"[]{"
_MAX_MEMBERS: Final = 64  # Limit of members of an object: the parser looks up each member linearly


class LargeData:
    """Tensor data in the parser's memory, as a nested list."""

    __slots__ = ("_elements",)

    def __init__(self, elements: Any) -> None:
        self._elements = elements

    def numbers(self, kind: NumberKind) -> Array | None:
        """Return all numbers depth first as float64, int64 or uint64; None if any element is not such a number."""
        try:
            return np.frombuffer(self._elements.as_buffer(of_type=kind), NUMBER_DTYPES[kind])
        except PARSER_ERRORS:
            return None

    def nesting(self, max_lists: int) -> tuple[tuple[int, ...], int] | None:
        """Return the shape and the number of lists; None if ragged, empty, mixed, or over ``max_lists``."""
        shape: list[int] = []
        level, kind, lists = [self._elements], type(self._elements), 0
        while True:
            lists += len(level)
            sizes = set(map(len, level))
            if len(sizes) != 1 or 0 in sizes:
                return None
            shape.append(sizes.pop())
            if not isinstance(level[0][0], kind):
                return tuple(shape), lists
            if lists + len(level) * shape[-1] > max_lists:
                return None
            level = [each for outer in level for each in outer]
            if set(map(type, level)) != {kind}:
                return None

    def as_list(self) -> list[Any]:
        """Return the elements as Python lists."""
        listed: list[Any] = self._elements.as_list()
        return listed


class _LargeMember(NamedTuple):
    """Member of an object: a list (``data``), or an object of lists (``members``)."""

    name: str
    data: LargeData | None
    members: Mapping[str, LargeData] = {}


def read_large_document(head: Buffer, max_levels: int) -> dict[str, Any] | None:
    """Parse a request; None if it is not an ordinary request, valid or not.

    The ``data`` of its ``inputs`` are :class:`LargeData`, which keep the parser's memory alive.
    """
    simdjson = simdjson_module()
    # The parser accepts a byte order mark, which JSON does not allow.
    if simdjson is None or head[0] != _BRACE or _is_deeper(head, max_levels):
        return None
    try:
        return _document(simdjson.Parser().parse(head), simdjson)
    except PARSER_ERRORS:
        return None


def read_large_member(head: Buffer, names: Collection[str], max_levels: int) -> _LargeMember | None:
    """Parse the single member among ``names``: a list, or an object of lists; None for any other document."""
    simdjson = simdjson_module()
    if simdjson is None or head[0] != _BRACE or _is_deeper(head, max_levels):
        return None
    try:
        root = simdjson.Parser().parse(head)
        (name,) = [name for name in names if name in (_keys(root, simdjson) or ())]
        value = root[name]
        if isinstance(value, simdjson.Array):
            return _LargeMember(name, LargeData(value))
        keys = _keys(value, simdjson)
        if keys is None or not all(isinstance(value[key], simdjson.Array) for key in keys):
            return None
        return _LargeMember(name, None, {key: LargeData(value[key]) for key in keys})
    except PARSER_ERRORS:
        return None


def count_lists(head: Buffer) -> int:
    """Count the lists of a document (upper bound: brackets in strings count too)."""
    return int(np.count_nonzero(np.frombuffer(head, np.uint8) == _OPENING))


def _is_deeper(head: Buffer, max_levels: int) -> bool:
    """Return whether lists may nest deeper (brackets in strings count too)."""
    given = np.frombuffer(head, np.uint8)
    brackets = given == _OPENING
    if np.count_nonzero(brackets) <= max_levels:
        return False
    brackets |= given == _CLOSING
    steps = np.where(given[brackets] == _OPENING, np.int32(1), np.int32(-1))
    return bool(np.cumsum(steps).max() > max_levels)


def _document(root: Any, simdjson: Any) -> dict[str, Any] | None:
    document = _members(root, "inputs", simdjson)
    if document is None or "inputs" not in document:
        return document
    inputs = []
    for given in root["inputs"]:
        members = _members(given, "data", simdjson)
        if members is None:
            return None
        if "data" in members:
            members["data"] = LargeData(given["data"])
        inputs.append(members)
    document["inputs"] = inputs
    return document


def _members(given: Any, large: str, simdjson: Any) -> dict[str, Any] | None:
    """Return the members of an object, with None for the large one; None if the object is unusual."""
    keys = _keys(given, simdjson)
    if keys is None:
        return None
    members = {key: None if key == large else _plain(given[key]) for key in keys}
    return None if large in members and not isinstance(given[large], simdjson.Array) else members


def _keys(given: Any, simdjson: Any) -> list[str] | None:
    """Return the member names of an object; None if the object is unusual."""
    if not isinstance(given, simdjson.Object) or len(given) > _MAX_MEMBERS:
        return None
    keys = list(given.keys())
    # Of a duplicate key the last one counts, but the parser finds the first.
    return None if len(set(keys)) < len(keys) else keys


def _plain(value: Any) -> Any:
    for name in ("as_dict", "as_list"):
        if hasattr(value, name):
            return getattr(value, name)()
    return value
