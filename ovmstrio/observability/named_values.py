"""Where a value ends that follows its name, whatever it is written in; what was cut ends where it was."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["end_of_value"]

_QUOTE: Final = re.compile(rb"(?<!\\)(\\*+)([\"'])")
_SIGNS: Final = re.compile(rb"(?<!\\)\\*+\"|[\[\]{}]")
_NUMBER: Final = re.compile(rb"(?:-?\d[\d.eE+-]*|true|false|null)(?![\w-])")
_JSON: Final = re.compile(rb"[^\s,}\]\\\"']*")
_FIELD: Final = re.compile(rb"[^\s&\"'<>\\]*")
_LINE: Final = re.compile(rb"[^\r\n\"'<>\\]*")
_ELEMENT: Final = re.compile(rb"[^<]*")
_PART: Final = re.compile(rb".*?(?=\r\n--|\Z)", re.DOTALL)
_WHOLE_LINES: Final = re.compile(rb"authori|cookie")
"""Values under such names have blanks in them."""
_MOST_OF_LENGTH: Final = 5
_MORE: Final = 0x80


def end_of_value(data: bytes, name: re.Match[bytes], *, counts: bool) -> int:
    """Tell where the value ends whose name, with the sign behind it, was found.

    Args:
        data: in which it was.
        name: its groups tell how it stands there: ``word``, and ``quote``, ``markup``, ``message`` or ``part``.
        counts: whether numbers are left, and so end where they begin.
    """
    groups, start = name.groupdict(), name.end()
    if groups.get("part"):
        return _end(_PART, data, start)
    if groups.get("message"):
        return _end_of_message(data, start)
    if groups.get("markup"):
        return _end(_ELEMENT, data, start)
    if counts and _NUMBER.match(data, start):
        return start
    quote = _QUOTE.match(data, start)
    if quote is not None:
        return _end_of_text(data, quote)
    if data[start : start + 1] in {b"[", b"{"}:
        end = _end_of_several(data, start, len(groups.get("quote") or b'"') - 1)
        has_texts = b'"' in data[start:end] or b"'" in data[start:end]
        return start if counts and not has_texts else end
    if groups.get("quote"):
        return _end(_JSON, data, start)
    takes_line = groups.get("sign") == b":" or _WHOLE_LINES.match(name["word"])
    return _end(_LINE if takes_line else _FIELD, data, start)


def _end(pattern: re.Pattern[bytes], data: bytes, start: int) -> int:
    found = pattern.match(data, start)
    return start if found is None else found.end()


def _end_of_text(data: bytes, opened: re.Match[bytes]) -> int:
    """Tell where a text ends, which may be one within another: its quotes are escaped then."""
    depth = len(opened[1])
    for quote in _QUOTE.finditer(data, opened.end()):
        escapes = len(quote[1])
        if quote[2] == opened[2] and (escapes <= depth if depth else escapes % 2 == 0):
            return quote.end()
    return len(data)


def _end_of_several(data: bytes, start: int, depth: int) -> int:
    """Tell where an array or an object ends, whose texts have quotes that are escaped so often."""
    levels, is_text = 0, False
    for sign in _SIGNS.finditer(data, start):
        if sign[0][-1:] == b'"':
            escapes = len(sign[0]) - 1
            if escapes < depth:
                return sign.start()
            if escapes == depth if depth else escapes % 2 == 0:
                is_text = not is_text
        elif not is_text:
            levels += 1 if sign[0] in b"[{" else -1
            if levels == 0:
                return sign.end()
    return len(data)


def _end_of_message(data: bytes, start: int) -> int:
    """Tell where a message of protobuf ends, which begins with its length."""
    length = 0
    for number, byte in enumerate(data[start : start + _MOST_OF_LENGTH]):
        length |= (byte & ~_MORE) << (7 * number)
        if byte < _MORE:
            return min(len(data), start + number + 1 + length)
    return start
