"""JSON reader with bounded work: limits are checked before any value is built.

::

    text ──scan──> brackets, commas, colons outside strings ──limits──> Python values, in slices
            └────> long lists of numbers ─────────────────────────────> NumberArray

The scan finds the structure of a document with NumPy, a window at a time. Containers larger than a slice are then
parsed in groups of their members, strings larger than a slice in parts, and everything else by orjson at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable
from itertools import pairwise
from secrets import token_hex
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import orjson

from ovmstrio.core.request import Buffer
from ovmstrio.core.tensor import Array
from ovmstrio.encoding.number_arrays import SHORTEST_RUN_BYTES, NumberArray, find_runs, list_bounds
from ovmstrio.util.slices import SLICE_BYTES, run_in_slices, run_to_end

T = TypeVar("T")

AT_ONCE_BYTES: Final = 64 * 1024
"""Size up to which a document is parsed at once: a smaller document cannot reach a limit."""
MAX_MEMBERS: Final = 16_384
"""Maximum objects, members of objects, and items of a list that a protocol interprets."""


class JsonLimits(NamedTuple):
    """Limits of a document.

    Attributes:
        members: members of all objects, and objects.
        values: list items and containers, without the numbers of a :class:`NumberArray`.
        containers: lists and objects, which take longest to build, to collect and to free.
        depth: nesting depth of containers.
        string_bytes: size of one string.
    """

    members: int = MAX_MEMBERS
    values: int = 524_288
    containers: int = 131_072
    depth: int = 100
    string_bytes: int = 16 * 1024 * 1024


PROTOCOL_DOCUMENT: Final = JsonLimits()
LONG_STRINGS: Final = PROTOCOL_DOCUMENT._replace(string_bytes=2**40)
"""Limits of documents whose strings may be files; the body limit applies first."""
USER_DOCUMENT: Final = JsonLimits(members=262_144, values=1_048_576, containers=262_144, depth=512, string_bytes=2**40)
"""Limits of documents that only user code interprets."""


class JsonSyntaxError(ValueError):
    """Error of a text that is not JSON."""


class JsonLimitExceeded(ValueError):
    """Error of a document that exceeds a limit; ``is_depth`` is true for the depth limit."""

    def __init__(self, message: str, *, is_depth: bool = False) -> None:
        super().__init__(message)
        self.is_depth = is_depth


Parse = Callable[[Buffer], Any]


def parse_at_once(text: Buffer) -> Any:
    """Parse a short text; ``NaN`` and ``Infinity`` are accepted, as by Python's ``json``.

    Raises:
        JsonSyntaxError: the text is not JSON.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raw = bytes(text)
        if b"NaN" in raw or b"Infinity" in raw:
            try:
                return json.loads(raw)
            except ValueError:
                pass
            except RecursionError:
                raise JsonSyntaxError("recursion limit exceeded") from None
        raise JsonSyntaxError(str(error)) from None


def parse_strictly(text: Buffer) -> Any:
    """Parse a short text without extensions of JSON.

    Raises:
        JsonSyntaxError: the text is not JSON.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise JsonSyntaxError(str(error)) from None


_LONG_NUMBER: Final = re.compile(rb"[0-9]{19}|[0-9][eE]")


def parse_as_python(text: Buffer) -> Any:
    """Parse a short text to exactly the values that Python's ``json.loads`` returns.

    Raises:
        JsonSyntaxError: the text is not JSON.
    """
    raw = bytes(text)
    # The faster parser returns floats for integers beyond 64 bits.
    if _LONG_NUMBER.search(raw) is None:
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError:
            pass
    try:
        return json.loads(raw)
    except ValueError as error:
        raise JsonSyntaxError(str(error)) from error
    except RecursionError:
        raise JsonSyntaxError("the JSON is nested too deeply") from None


async def parse_json(text: Buffer, limits: JsonLimits = PROTOCOL_DOCUMENT, *, parse: Parse = parse_at_once) -> Any:
    """Parse a document: at once up to :data:`AT_ONCE_BYTES`, otherwise in slices in a worker thread.

    Raises:
        JsonSyntaxError: the text is not JSON.
        JsonLimitExceeded: the document exceeds a limit.

    Cancellation: between two turns of the thread; not a checkpoint for short documents.
    """
    if len(text) <= AT_ONCE_BYTES:
        return parse(text)
    return await run_in_slices(read_json(text, limits, parse=parse))


def read_json(
    text: Buffer,
    limits: JsonLimits = PROTOCOL_DOCUMENT,
    *,
    parse: Parse = parse_at_once,
    arrays: list[NumberArray] | None = None,
) -> Generator[None, None, Any]:
    """Read a document in slices.

    Args:
        text: the document.
        limits: checked before any value is built.
        parse: parses a part that is a complete document.
        arrays: receives a :class:`NumberArray` for each long list of numbers; None reads these lists as Python lists.

    Raises:
        JsonSyntaxError: the text is not JSON.
        JsonLimitExceeded: the document exceeds a limit.
    """
    view = memoryview(text)
    scan = _Scan(limits)
    found: dict[str, NumberArray] = {}
    skeleton: list[Buffer] = []
    position = 0
    for run in () if arrays is None else find_runs(view):
        if run is None:
            yield
            continue
        yield from scan.feed(view[position : run[0]])
        skeleton.append(view[position : run[0]])
        position = run[0]
        bounds = None if scan.is_in_string else list_bounds(view, *run, limits.depth - scan.depth)
        if bounds is None or bounds[1] - bounds[0] < SHORTEST_RUN_BYTES:
            continue
        yield from scan.feed(view[position : bounds[0]])
        name = f"{_PLACEHOLDER}:{len(found)}"
        found[name] = NumberArray(view[bounds[0] : bounds[1]])
        skeleton += [view[position : bounds[0]], f'"{name}"'.encode()]
        scan.skip(len(skeleton[-1]))
        position = bounds[1]
    yield from scan.feed(view[position:])
    structure = scan.finish()
    if not found:
        return (yield from _Builder(view, structure, parse, limits).document())
    skeleton.append(view[position:])
    root = yield from _Builder(memoryview(b"".join(skeleton)), structure, parse, limits).document()
    if arrays is not None:
        arrays += found.values()
    return (yield from _with_arrays(root, found))


_PLACEHOLDER: Final = token_hex(16)
"""Prefix of the placeholders for arrays while a document is built; clients cannot guess it."""


def _with_arrays(root: Any, arrays: dict[str, NumberArray]) -> Generator[None, None, Any]:
    """Replace the placeholders of a document by their arrays."""
    if type(root) is str:
        return arrays.get(root, root)
    waiting = [root]
    while waiting:
        yield
        holder = waiting.pop()
        is_object = type(holder) is dict
        for key, value in holder.items() if is_object else enumerate(holder):
            kind = type(value)
            if kind is dict or kind is list:
                waiting.append(value)
            elif kind is str and value in arrays:
                holder[key] = arrays[value]
        if is_object and not arrays.keys().isdisjoint(holder):
            raise JsonSyntaxError("expected a string for a name, got a list")
    return root


# Arrays that do not contain numbers, or are not read


def read_array(array: NumberArray) -> list[Any]:
    """Return an array as a Python list.

    Raises:
        JsonSyntaxError: the text is not JSON.
        JsonLimitExceeded: the array exceeds the limits of Python lists.
    """
    found: list[Any] = run_to_end(read_json(array.text))
    array.is_checked = True
    return found


def check_arrays(arrays: Iterable[NumberArray]) -> Generator[None, None, None]:
    """Check the text of unread arrays, in slices.

    Raises:
        JsonSyntaxError: a text is not JSON.
        JsonLimitExceeded: an array exceeds the limits of Python lists.
    """
    for array in arrays:
        yield
        if not array.is_checked and array.numbers("d") is None:
            read_array(array)


def without_arrays(value: Any) -> Any:
    """Replace the arrays in a value by Python lists.

    Raises:
        JsonSyntaxError: the text of an array is not JSON.
        JsonLimitExceeded: the arrays together exceed the limits of Python lists.
    """
    if type(value) is NumberArray:
        return read_array(value)
    waiting = [value] if type(value) in {list, dict} else []
    arrays: list[NumberArray] = []
    places: list[tuple[Any, Any]] = []
    while waiting:
        holder = waiting.pop()
        for key, item in holder.items() if type(holder) is dict else enumerate(holder):
            if type(item) is NumberArray:
                arrays.append(item)
                places.append((holder, key))
            elif type(item) in {list, dict}:
                waiting.append(item)
    if not arrays:
        return value
    # One document, so that the limits apply to all arrays together.
    lists = read_array(NumberArray(memoryview(b"[%b]" % b",".join(array.text for array in arrays))))
    for array, (holder, key), items in zip(arrays, places, lists, strict=True):
        holder[key] = items
        array.is_checked = True
    return value


# The scan for the structure

_QUOTE, _BACKSLASH, _COLON, _COMMA, _OPEN_LIST, _OPEN_OBJECT, _CLOSE_LIST, _CLOSE_OBJECT = range(1, 9)
_KINDS: Final = bytes(
    b'\0"\\:,[{]}'.find(bytes([byte])) if byte and bytes([byte]) in b'"\\:,[{]}' else 0 for byte in range(256)
)
_DEPTH_STEPS: Final = np.array([0, 0, 0, 0, 0, 1, 1, -1, -1], np.int8)


class _Structure(NamedTuple):
    """Brackets, commas and colons of a document outside strings, in their order.

    Attributes:
        positions: byte offsets.
        kinds: kinds of characters.
        depths: the depth of a bracket's container, or of the container around a comma or colon.
    """

    positions: Array
    kinds: Array
    depths: Array


class _Scan:
    """A scanner of a text's structure, which works in windows.

    Attributes:
        is_in_string: whether the text so far ends inside a string.
        depth: number of open containers at the end of the text so far.
    """

    def __init__(self, limits: JsonLimits) -> None:
        self._limits = limits
        self._parts: list[_Structure] = []
        self._at = 0
        self._members = self._objects = self._values = self._containers = 0
        self.is_in_string = False
        self.depth = 0

    def feed(self, text: memoryview) -> Generator[None, None, None]:
        """Scan more of the text.

        Raises:
            JsonSyntaxError: a closing bracket has no opening bracket.
            JsonLimitExceeded: the document exceeds a limit.
        """
        start = 0
        while start < len(text):
            window = bytes(text[start : start + SLICE_BYTES])
            if (len(window) - len(window.rstrip(b"\\"))) % 2 and start + len(window) < len(text):
                # The next window must contain a backslash together with the escaped character.
                window = window[:-1]
            self._scan(window)
            self._at += len(window)
            start += len(window)
            yield

    def skip(self, length: int) -> None:
        """Skip text without structure."""
        self._at += length

    def finish(self) -> _Structure:
        """Return the structure of the text.

        Raises:
            JsonSyntaxError: a string or container is not closed.
        """
        if self.is_in_string or self.depth:
            what = "a string" if self.is_in_string else f"{self.depth} lists or objects"
            raise JsonSyntaxError(f"unexpected end of data: {what} not closed")
        if not self._parts:
            nothing = np.empty(0, np.int64)
            return _Structure(nothing, nothing, nothing)
        return _Structure(*map(np.concatenate, zip(*self._parts, strict=True)))

    def _scan(self, window: bytes) -> None:
        kinds_of_all = np.frombuffer(window.translate(_KINDS), np.uint8)
        found = np.flatnonzero(kinds_of_all)
        kinds = kinds_of_all[found]
        if b"\\" in window:
            found, kinds = self._without_escaped(found, kinds, len(window))
        if self.is_in_string or b'"' in window:
            quotes = np.cumsum(kinds == _QUOTE, dtype=np.int32)
            quotes += self.is_in_string
            self.is_in_string = bool(quotes[-1] & 1) if len(quotes) else self.is_in_string
            kept = (kinds > _BACKSLASH) & ((quotes & 1) == 0)
            found, kinds = found[kept], kinds[kept]
        if not len(found):
            return
        depths = np.cumsum(_DEPTH_STEPS[kinds], dtype=np.int32)
        depths += self.depth
        self.depth = int(depths[-1])
        if int(depths.min()) < 0:
            raise JsonSyntaxError("unmatched closing bracket")
        self._count(kinds, int(depths.max()))
        depths += kinds >= _CLOSE_LIST
        self._parts.append(_Structure(found + self._at, kinds, depths))

    def _count(self, kinds: Array, depth: int) -> None:
        counts = np.bincount(kinds, minlength=_CLOSE_OBJECT + 1)
        self._members += int(counts[_COLON])
        self._objects += int(counts[_OPEN_OBJECT])
        containers = int(counts[_OPEN_LIST] + counts[_OPEN_OBJECT])
        self._containers += containers
        self._values += int(counts[_COMMA]) + containers
        limits = self._limits
        if depth > limits.depth:
            raise JsonLimitExceeded(f"expected at most {limits.depth} nested lists and objects", is_depth=True)
        if max(self._members, self._objects) > limits.members:
            raise JsonLimitExceeded(f"expected at most {limits.members} objects and members of objects, got more")
        if self._containers > limits.containers:
            raise JsonLimitExceeded(f"expected at most {limits.containers} lists and objects, got more")
        if self._values > limits.values:
            raise JsonLimitExceeded(f"expected at most {limits.values} values, got more")

    @staticmethod
    def _without_escaped(found: Array, kinds: Array, length: int) -> tuple[Array, Array]:
        """Remove backslashes and escaped quotes."""
        is_backslash = kinds == _BACKSLASH
        slashes = found[is_backslash]
        # In a row of backslashes, every second one is escaped by its predecessor.
        count = np.arange(len(slashes))
        starts = np.where(np.diff(slashes, prepend=-2) != 1, count, 0)
        escaping = slashes[(count - np.maximum.accumulate(starts)) % 2 == 0]
        is_escaped = np.zeros(length + 1, np.bool_)
        is_escaped[escaping + 1] = True
        kept = ~(is_backslash | is_escaped[found])
        return found[kept], kinds[kept]


# Building values

_OPENINGS: Final = {_OPEN_LIST: _CLOSE_LIST, _OPEN_OBJECT: _CLOSE_OBJECT}
_BLANKS: Final = b" \t\r\n"
_HIGH_SURROGATE: Final = re.compile(rb"\\u[dD][89abAB]..")
_ESCAPE_BYTES: Final = 6
_CONTINUATIONS: Final = range(0x80, 0xC0)


class _Builder:
    """A builder of a document's values, which splits containers larger than a slice.

    Args:
        text: the document.
        structure: its brackets, commas and colons.
        parse: parses a part that is a complete document.
    """

    def __init__(self, text: memoryview, structure: _Structure, parse: Parse, limits: JsonLimits) -> None:
        self._text = text
        self._max_string_bytes = limits.string_bytes
        self._positions, self._kinds, self._depths = structure
        self._parse = parse
        self._commas = self._by_depth(_COMMA, _COMMA)
        self._closings = self._by_depth(_CLOSE_LIST, _CLOSE_OBJECT)

    def document(self) -> Generator[None, None, Any]:
        return self._value(0, len(self._text), 0, len(self._positions))

    def _by_depth(self, first: int, last: int) -> dict[int, Array]:
        """Return the ordered indices of entries of the kinds from ``first`` to ``last``, by depth."""
        found = np.flatnonzero((self._kinds >= first) & (self._kinds <= last))
        depths = self._depths[found]
        order = np.argsort(depths, kind="stable")
        found, depths = found[order], depths[order]
        starts = np.flatnonzero(np.diff(depths, prepend=-1))
        bounds = [*starts.tolist(), len(found)]
        return {int(depths[at]): found[at:end] for at, end in pairwise(bounds)}

    def _value(self, start: int, end: int, first: int, last: int) -> Generator[None, None, Any]:
        """Build the value of a span with the structure entries from ``first`` to before ``last``."""
        if end - start <= SLICE_BYTES:
            yield
            return self._parse_span(start, end)
        if first == last:
            return (yield from self._scalar(start, end))
        self._check_container(start, end, first, last - 1)
        inside = int(self._positions[first]) + 1, int(self._positions[last - 1])
        if first + 1 == last - 1 and self._is_blank(*inside):
            return [] if self._kinds[first] == _OPEN_LIST else {}
        depth = int(self._depths[first])
        commas = self._commas.get(depth, np.empty(0, np.int64))
        inner = commas[np.searchsorted(commas, first) : np.searchsorted(commas, last)]
        # Each member is between two of these entries.
        bounds = np.concatenate(([first], inner, [last - 1]))
        build = self._list if self._kinds[first] == _OPEN_LIST else self._object
        return (yield from build(bounds))

    def _check_container(self, start: int, end: int, opening: int, closing: int) -> None:
        depth = int(self._depths[opening])
        closings = self._closings.get(depth, np.empty(0, np.int64))
        match = int(np.searchsorted(closings, opening))
        is_matched = (
            _OPENINGS.get(int(self._kinds[opening])) == self._kinds[closing]
            and match < len(closings)
            and closings[match] == closing
        )
        outside = (start, int(self._positions[opening])), (int(self._positions[closing]) + 1, end)
        if not is_matched or not all(self._is_blank(*span) for span in outside):
            raise JsonSyntaxError(f"unexpected characters or brackets near byte {start}")

    def _list(self, bounds: Array) -> Generator[None, None, list[Any]]:
        made: list[Any] = []
        for begin, end in self._groups(bounds):
            first, last = int(bounds[begin]), int(bounds[end])
            span = int(self._positions[first]) + 1, int(self._positions[last])
            self._check_not_blank(*span)
            if end - begin == 1:
                made.append((yield from self._value(*span, first + 1, last)))
            else:
                yield
                made += self._parse_span(*span, b"[", b"]")
        return made

    def _object(self, bounds: Array) -> Generator[None, None, dict[str, Any]]:
        made: dict[str, Any] = {}
        for begin, end in self._groups(bounds):
            first, last = int(bounds[begin]), int(bounds[end])
            start, stop = int(self._positions[first]) + 1, int(self._positions[last])
            self._check_not_blank(start, stop)
            if end - begin > 1 or stop - start <= SLICE_BYTES:
                yield
                made.update(self._parse_span(start, stop, b"{", b"}"))
                continue
            if self._kinds[first + 1] != _COLON:
                raise JsonSyntaxError(f"expected a name and a colon near byte {start}")
            colon = int(self._positions[first + 1])
            is_long = colon - start > SLICE_BYTES
            name = (yield from self._scalar(start, colon)) if is_long else self._parse_span(start, colon)
            if type(name) is not str:
                raise JsonSyntaxError(f"expected a string for a name near byte {start}")
            made[name] = yield from self._value(colon + 1, stop, first + 2, last)
        return made

    def _groups(self, bounds: Array) -> Generator[tuple[int, int], None, None]:
        """Group members: each group has at most one slice of text, or one member."""
        places = self._positions[bounds]
        begin, last = 0, len(bounds) - 1
        while begin < last:
            end = int(np.searchsorted(places, places[begin] + SLICE_BYTES, side="right")) - 1
            end = min(max(end, begin + 1), last)
            yield begin, end
            begin = end

    def _scalar(self, start: int, end: int) -> Generator[None, None, Any]:
        """Build a string or number longer than a slice; a string is built in parts."""
        start, end = self._without_blanks(start, end)
        if bytes(self._text[start : start + 1]) != b'"':
            if end - start > SLICE_BYTES:
                raise JsonSyntaxError(f"number of {end - start} bytes near byte {start}")
            return self._parse_span(start, end)
        if end - start > self._max_string_bytes:
            raise JsonLimitExceeded(f"expected strings of at most {self._max_string_bytes} bytes, got {end - start}")
        parts: list[str] = []
        before = b""
        while end - start > SLICE_BYTES:
            cut = self._string_cut(start, start + SLICE_BYTES)
            parts.append(self._parse_span(start, cut, before, b'"'))
            start, before = cut, b'"'
            yield
        parts.append(self._parse_span(start, end, before))
        return "".join(parts)

    def _string_cut(self, start: int, cut: int) -> int:
        """Return the last position up to ``cut`` that splits no character and no escape sequence of a string."""
        while self._text[cut] in _CONTINUATIONS:
            cut -= 1
        slash = bytes(self._text[cut - _ESCAPE_BYTES : cut]).rfind(b"\\")
        if slash < 0:
            return cut
        slash += cut - _ESCAPE_BYTES
        before = bytes(self._text[start : slash + 1])
        if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:
            # The backslash is escaped itself.
            return cut
        ends = slash + (_ESCAPE_BYTES if bytes(self._text[slash + 1 : slash + 2]) == b"u" else 2)
        if ends <= cut and not self._is_high_surrogate(slash):
            return cut
        return slash - _ESCAPE_BYTES if self._is_high_surrogate(slash - _ESCAPE_BYTES) else slash

    def _is_high_surrogate(self, at: int) -> bool:
        return _HIGH_SURROGATE.match(bytes(self._text[at : at + _ESCAPE_BYTES])) is not None

    def _is_blank(self, start: int, end: int) -> bool:
        start, end = self._without_blanks(start, end)
        return start == end

    def _without_blanks(self, start: int, end: int) -> tuple[int, int]:
        """Return the bounds of a span without surrounding white space."""
        while start < end:
            window = bytes(self._text[start : min(end, start + SLICE_BYTES)])
            start += len(window) - len(left := window.lstrip(_BLANKS))
            if left:
                break
        while start < end:
            window = bytes(self._text[max(start, end - SLICE_BYTES) : end])
            end -= len(window) - len(left := window.rstrip(_BLANKS))
            if left:
                break
        return start, end

    def _check_not_blank(self, start: int, end: int) -> None:
        if self._is_blank(start, end):
            raise JsonSyntaxError(f"expected a value near byte {start}")

    def _parse_span(self, start: int, end: int, before: bytes = b"", after: bytes = b"") -> Any:
        span = self._text[start:end]
        try:
            return self._parse(b"".join((before, span, after)) if before or after else span)
        except JsonSyntaxError as error:
            if not start and end == len(self._text):
                raise
            raise JsonSyntaxError(f"{error}, counted from byte {start - len(before)}") from None
