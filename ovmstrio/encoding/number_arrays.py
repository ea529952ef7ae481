"""NumPy arrays from nested JSON lists of numbers, without one Python object per number."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import pairwise
from math import prod
from typing import Any, Final, Literal

import numpy as np
import orjson
import structlog

from ovmstrio.core.tensor import Array
from ovmstrio.util.extras import Extra, install_command
from ovmstrio.util.slices import SLICE_BYTES

log = structlog.get_logger(__name__)

NumberKind = Literal["d", "i", "u"]
"""Doubles, signed or unsigned 64-bit integers."""

NUMBER_DTYPES: Final[dict[NumberKind, Any]] = {"d": np.float64, "i": np.int64, "u": np.uint64}
_NUMBER_BYTES: Final = b"0123456789+-.eE \t\r\n"
_QUOTE: Final = ord('"')
_STEPS: Final = bytes({ord("["): 1, ord("]"): 255}.get(byte, 0) for byte in range(256))
_OPENING, _CLOSING, _COMMA = b"[],"
_STEP_OF: Final = np.frombuffer(_STEPS, np.int8)
_MAX_NUMBER_WINDOWS: Final = 2
_MAX_RANK: Final = 32
"""Dimensions that NumPy supports."""
_BRACKETS_TO_BLANKS: Final = bytes.maketrans(b"[]", b"  ")
PARSER_ERRORS: Final = (ValueError, TypeError, RuntimeError, KeyError, IndexError, OverflowError)
"""Errors that the parser raises."""
SHORTEST_RUN_BYTES: Final = 1024
"""Shorter lists of numbers are read as Python lists."""


class NumberArray:
    """A list of numbers, or of lists of numbers, as JSON text.

    Only the brackets of the text have been checked: the text may be invalid JSON, or contain other values.

    Args:
        text: the list from its first bracket to its last.

    Attributes:
        is_checked: whether the text is known to be JSON.
    """

    __slots__ = ("is_checked", "text")

    def __init__(self, text: memoryview) -> None:
        self.text = text
        self.is_checked = False

    def numbers(self, kind: NumberKind) -> Array | None:
        """Return all numbers in depth-first order; None if the text is not JSON or has other values."""
        parser = None if simdjson_module() is None else simdjson_module().Parser()
        parts: list[Array] = []
        for piece in self._pieces():
            part = _parse_numbers(parser, piece, kind)
            if part is None or not len(part):
                return None
            parts.append(part)
        result = np.empty(sum(map(len, parts)), NUMBER_DTYPES[kind])
        filled = 0
        for part in parts:
            result[filled : filled + len(part)] = part
            filled += len(part)
        self.is_checked = True
        return result

    def shape(self) -> tuple[int, ...] | None:
        """Return the shape of the lists; None if lists of one level differ in length or rank.

        An empty list counts as one number, so that the product of the shape differs from the count of numbers.
        """
        levels: list[_Level] = []
        depth, is_begin = 0, True
        for window in self._windows():
            structure = np.frombuffer(window.translate(None, _NUMBER_BYTES), np.uint8)
            if is_begin:
                ends = np.flatnonzero(structure != _OPENING)
                levels += [_Level() for _ in range(int(ends[0]) if len(ends) else len(structure))]
                is_begin = not len(ends)
            depths = np.cumsum(_STEP_OF[structure], dtype=np.int32)
            depths += depth
            depth = int(depths[-1]) if len(depths) else depth
            depths += structure == _CLOSING
            if len(depths) and int(depths.max()) > len(levels):
                return None
            for level, counts in enumerate(levels, 1):
                if not counts.add(structure[depths == level]):
                    return None
            if len(levels) > _MAX_RANK:
                return None
        # All items are lists, except in the innermost lists.
        is_regular = all(outer.items == inner.lists for outer, inner in pairwise(levels))
        return tuple(level.size for level in levels) if levels and is_regular else None

    def _windows(self) -> Iterator[bytes]:
        for start in range(0, len(self.text), SLICE_BYTES):
            yield bytes(self.text[start : start + SLICE_BYTES])

    def _pieces(self) -> Iterator[bytes]:
        """Split the text at commas and remove brackets; stop early at a number that is too long."""
        rest: list[bytes] = []
        for window in self._windows():
            numbers = window.translate(_BRACKETS_TO_BLANKS) if b"[" in window or b"]" in window else window
            last = numbers.rfind(b",")
            if last >= 0:
                yield b"".join((*rest, numbers[:last]))
                rest = [numbers[last + 1 :]]
            elif not numbers.isspace():
                rest.append(numbers)
                if len(rest) > _MAX_NUMBER_WINDOWS:
                    break
        yield b"".join(rest)


def read_numbers(value: Any, kind: NumberKind) -> Array | None:
    """Return the numbers of an array, or of a list of arrays of one shape, in the lists' shape; None otherwise."""
    rows = value if type(value) is list else [value]
    if not rows or set(map(type, rows)) != {NumberArray}:
        return None
    shapes = {row.shape() for row in rows}
    shape = shapes.pop()
    if shapes or shape is None:
        return None
    parts: list[Array] = []
    for row in rows:
        part = row.numbers(kind)
        if part is None or part.size != prod(shape):
            return None
        parts.append(part)
    return parts[0].reshape(shape) if rows is not value else np.concatenate(parts).reshape(len(rows), *shape)


class _Level:
    """Counts of the lists of one level.

    Attributes:
        size: the length of each list; 0 before the first list ends.
        lists: lists that have ended.
        items: items of the lists.
    """

    __slots__ = ("_commas", "lists", "size")

    def __init__(self) -> None:
        self.size = self.lists = self._commas = 0

    @property
    def items(self) -> int:
        return self._commas + self.lists

    def add(self, structure: Array) -> bool:
        """Count brackets and commas of the level; return whether all lists have the same length."""
        commas = np.cumsum(structure == _COMMA, dtype=np.int64)
        at_ends = commas[structure == _CLOSING] + self._commas
        if len(at_ends):
            self.size = self.size or int(at_ends[0]) + 1
            expected = np.arange(self.lists + 1, self.lists + 1 + len(at_ends)) * (self.size - 1)
            if not np.array_equal(at_ends, expected):
                return False
        self.lists += len(at_ends)
        self._commas += int(commas[-1]) if len(commas) else 0
        return True


def find_runs(text: memoryview) -> Iterator[tuple[int, int] | None]:
    """Find runs of at least :data:`SHORTEST_RUN_BYTES` without a quote, which may contain long lists of numbers.

    Yields the bounds of each run, and None after each slice of the text.
    """
    begin = 0
    for start in range(0, len(text), SLICE_BYTES):
        quotes = np.flatnonzero(np.frombuffer(text[start : start + SLICE_BYTES], np.uint8) == _QUOTE) + start
        if len(quotes):
            bounds = np.concatenate(([begin - 1], quotes))
            for index in np.flatnonzero(np.diff(bounds) > SHORTEST_RUN_BYTES):
                yield int(bounds[index]) + 1, int(bounds[index + 1])
            begin = int(quotes[-1]) + 1
        yield None
    if len(text) - begin >= SHORTEST_RUN_BYTES:
        yield begin, len(text)


def list_bounds(text: memoryview, start: int, end: int, max_depth: int) -> tuple[int, int] | None:
    """Return the bounds of a run's first list; None if the list exceeds the run or ``max_depth``."""
    first = bytes(text[start : min(end, start + SHORTEST_RUN_BYTES)]).find(b"[")
    if first < 0:
        return None
    begin = start + first
    depth = 0
    for at in range(begin, end, SLICE_BYTES):
        window = bytes(text[at : min(end, at + SLICE_BYTES)])
        if depth <= 1 and b"[" not in window[not depth :]:
            # Most windows contain numbers of one list only.
            last = window.find(b"]")
            depth = 1
            if last >= 0:
                return begin, at + last + 1
            continue
        depths = np.cumsum(np.frombuffer(window.translate(_STEPS), np.int8), dtype=np.int32)
        depths += depth
        if int(depths.max()) > max_depth:
            return None
        closed = depths <= 0
        last = int(closed.argmax())
        if closed[last]:
            return begin, at + last + 1
        depth = int(depths[-1])
    return None


def _parse_numbers(parser: Any, piece: bytes, kind: NumberKind) -> Array | None:
    """Parse comma-separated numbers; None if one is not a number of ``kind``."""
    text = b"[%b]" % piece
    try:
        if parser is not None:
            return np.frombuffer(parser.parse(text).as_buffer(of_type=kind), NUMBER_DTYPES[kind])
        values = orjson.loads(text)
        if not {int} >= set(map(type, values)) and (kind != "d" or not {int, float} >= set(map(type, values))):
            return None
        return np.array(values, NUMBER_DTYPES[kind])
    except PARSER_ERRORS:
        return None


@cache
def simdjson_module() -> Any:
    """Import the faster parser at the first large body; None without the extra ``json``."""
    try:
        return import_module("simdjson")
    except ImportError:
        log.info("large JSON bodies parsed without pysimdjson", install=install_command(Extra.JSON))
        return None
