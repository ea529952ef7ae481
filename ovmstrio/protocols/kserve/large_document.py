"""Large JSON bodies whose numbers become arrays without ever being objects of Python.

::

    head ─> simdjson ─┬─> names, shapes, parameters: as any JSON
                      └─> data: LargeData ─> array(kind), or whatever else is there as a list

The parser finds what is where in one pass, and fills an array from there in another: a fifth of the time that a list of
numbers takes.  It is used where it says the same as the careful way; whatever it refuses goes that way.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ovmstrio.core.request import Buffer
from ovmstrio.core.tensor import Array

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ovmstrio.encoding.number_arrays import NumberKind

__all__ = [
    "LARGE_BYTES",
    "LargeData",
    "LargeMember",
    "count_lists",
    "read_large_document",
    "read_large_member",
]

LARGE_BYTES: Final = 4096
"""From which on it pays."""

_OPENING, _CLOSING, _BRACE = b"[]{"
_MOST_MEMBERS: Final = 64
"""Of an object: the parser looks for each from the first one on."""
_DTYPES: Final = {"d": np.float64, "i": np.int64, "u": np.uint64}
_REFUSALS: Final = (ValueError, TypeError, RuntimeError, KeyError, IndexError)
"""What the parser raises, of its own accord or of the system's: a text, number or depth that it does not take."""


class LargeData:
    """The elements of one tensor, which lie in the parser's memory.

    Args:
        elements: the parser's list, of any depth.
    """

    __slots__ = ("_elements",)

    def __init__(self, elements: Any) -> None:
        self._elements = elements

    def numbers(self, kind: NumberKind) -> Array | None:
        """Give all numbers, depth first, as doubles or 64-bit integers; None unless each element is such a number."""
        try:
            return np.frombuffer(self._elements.as_buffer(of_type=kind), _DTYPES[kind])
        except _REFUSALS:
            return None

    def nesting(self, most_lists: int) -> tuple[tuple[int, ...], int] | None:
        """Give the shape that the lists make, and how many lists there are, as far as each level begins with one.

        None where lists of one level differ in length or in what they have, one is empty, or there are more of them.
        """
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
            if lists + len(level) * shape[-1] > most_lists:
                return None
            level = [each for outer in level for each in outer]
            if set(map(type, level)) != {kind}:
                return None

    def as_list(self) -> list[Any]:
        """Give the elements as Python has them."""
        listed: list[Any] = self._elements.as_list()
        return listed


class LargeMember(NamedTuple):
    """A member of an object: a list, or an object of lists.

    Attributes:
        name: the member's.
        data: the list; None for an object.
        members: the lists of an object, by name.
    """

    name: str
    data: LargeData | None
    members: Mapping[str, LargeData] = {}


def read_large_document(head: Buffer, most_levels: int) -> dict[str, Any] | None:
    """Read an object; None for whatever is not plain JSON of a request, valid or not.

    The ``data`` of its ``inputs`` are :class:`LargeData`, which keep the memory of the parser.

    Args:
        head: the bytes.
        most_levels: how many lists may lie in each other.
    """
    simdjson = _parser_module()
    # It passes over a mark of the byte order, which JSON has not.
    if simdjson is None or head[0] != _BRACE or _is_deeper(head, most_levels):
        return None
    try:
        return _document(simdjson.Parser().parse(head), simdjson)
    except _REFUSALS:
        return None


def read_large_member(head: Buffer, names: Collection[str], most_levels: int) -> LargeMember | None:
    """Read the one member of an object whose name is among ``names``: a list, or an object of lists.

    None for whatever is not plain JSON of that form, valid or not.
    """
    simdjson = _parser_module()
    if simdjson is None or head[0] != _BRACE or _is_deeper(head, most_levels):
        return None
    try:
        root = simdjson.Parser().parse(head)
        (name,) = [name for name in names if name in (_keys(root, simdjson) or ())]
        value = root[name]
        if isinstance(value, simdjson.Array):
            return LargeMember(name, LargeData(value))
        keys = _keys(value, simdjson)
        if keys is None or not all(isinstance(value[key], simdjson.Array) for key in keys):
            return None
        return LargeMember(name, None, {key: LargeData(value[key]) for key in keys})
    except _REFUSALS:
        return None


def count_lists(head: Buffer) -> int:
    """Count the lists of a document, as far as texts have no brackets."""
    return int(np.count_nonzero(np.frombuffer(head, np.uint8) == _OPENING))


def _is_deeper(head: Buffer, most_levels: int) -> bool:
    """Tell whether more lists may lie in each other, as far as texts have no brackets."""
    given = np.frombuffer(head, np.uint8)
    brackets = given == _OPENING
    if np.count_nonzero(brackets) <= most_levels:
        return False
    brackets |= given == _CLOSING
    steps = np.where(given[brackets] == _OPENING, np.int32(1), np.int32(-1))
    return bool(np.cumsum(steps).max() > most_levels)


@cache
def _parser_module() -> Any:
    """Load the parser with the first body that it is for; None where there is none, on machines without a wheel."""
    try:
        return import_module("simdjson")
    except ImportError:
        return None


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
    """Give the members of an object, but for a large one, which must be a list; None if there is anything odd."""
    keys = _keys(given, simdjson)
    if keys is None:
        return None
    members = {key: None if key == large else _plain(given[key]) for key in keys}
    return None if large in members and not isinstance(given[large], simdjson.Array) else members


def _keys(given: Any, simdjson: Any) -> list[str] | None:
    """Give the names of an object's members; None if there is anything odd."""
    if not isinstance(given, simdjson.Object) or len(given) > _MOST_MEMBERS:
        return None
    keys = list(given.keys())
    # The last of a key that stands there twice counts, and the parser finds the first.
    return None if len(set(keys)) < len(keys) else keys


def _plain(value: Any) -> Any:
    for name in ("as_dict", "as_list"):
        if hasattr(value, name):
            return getattr(value, name)()
    return value
