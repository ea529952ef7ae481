"""What was sent, without what looks like a secret: for who has asked to see it.

Values are blanked whose names say that they are secret, in JSON (also in texts of JSON), in forms, lines of headers,
markup and messages of protobuf, and texts that look like keys and tokens wherever they stand.  A text that nothing
tells from others stays.  How long it takes grows with the size alone, as what was sent is up to who has sent it::

    body ─> escapes of letters and quotes ─> values behind names that are secret ─> keys and tokens ─> text
            \u0061, %61                      "password": ..., password=...          ovms_..., eyJ...
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote_to_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

# ----------------------------------------------------------------------
# Where a value ends that follows its name, whatever it is written in; what was cut ends where it was
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# What was sent, without what looks like a secret: for who has asked to see it
# ----------------------------------------------------------------------

_BLANK: Final = b"***"
_LEAST_KNOWN: Final = 4
"""Bytes of a header's value for which it is looked for elsewhere."""
_FORM: Final = "application/x-www-form-urlencoded"

_WORDS: Final = (
    rb"secret|passw|passphrase|pwd|token|(?:api|access|account|shared|auth|encryption)[ _.-]?key|authori[sz]ation"
    rb"|credential|private|cookie|bearer|amz-signature"
)
_SECRET: Final = re.compile(_WORDS)
_COUNTED: Final = re.compile(rb"token")
"""Numbers under such names count something."""
_NAMES: Final = re.compile(
    rb"(?P<word>" + _WORDS + rb")[\w.\x80-\xff-]{0,64}+(?:[\w .\x80-\xff-]{1,64}(?=\\{0,16}[\"']))?"
    rb"(?P<quote>\\{0,16}[\"'])?\]?"
    rb"(?:[ \t\r\n]{0,32}(?P<sign>[:=])>?[ \t\r\n]{0,32}|(?P<markup>>)|(?P<message>\x12)|(?P<part>\r\n\r\n))"
)
"""Names of what follows: a value behind a sign, or the content of an element of markup, a message, or a form's part."""
_TOLD_NAMES: Final = re.compile(
    rb"(?P<quote>\\{0,16}[\"'])(?:name|key|header|field|id)\\{0,16}[\"']\s{0,8}(?P<sign>:)\s{0,8}\\{0,16}[\"']"
    rb"[^\"']{0,64}?(?P<word>" + _WORDS + rb")[^\"']{0,64}[\"'].{0,300}?"
    rb"[\"'](?:value|data|contents|string_param)\\{0,16}[\"']\s{0,8}:\s{0,8}",
    re.DOTALL,
)
"""Names that are values themselves, such as those of tensors."""
_PART_WITH_TYPE: Final = re.compile(
    rb"content-disposition:[^\r\n;]{0,64}; ?name=\"?[^\"\r\n;]{0,64}?(?P<word>" + _WORDS + rb")[^\r\n]{0,200}+"
    rb"(?:\r\n[^\r\n]{1,200}+){0,4}+(?P<part>\r\n\r\n)"
)
_ESCAPED: Final = re.compile(
    rb"(?:\\{1,8}u00|(?P<form>%))(4[1-9a-f]|5[0-9af]|6[1-9a-f]|7[0-9a]|3[0-9ad]|2[2-7d])", re.IGNORECASE
)
_KEYS: Final = re.compile(
    rb"(?:\b(?:ovms_|sk-|hf_|gh[pousr]_|glpat-|xox[abps]-|AIza)[\w-]{12,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    rb"|\beyJ[\w-]{8,}+(?:\.[\w-]*+){0,4}|(?<=[Bb]earer )[^\s\"'\\]+|(?<=://)[^/\s@\"]{1,256}(?=@)"
    rb"|(?<=[?&]sig=)[^&\s\"'\\]+"
    rb"|(?<=PRIVATE KEY-----).*?(?=-----END|\Z))",
    re.DOTALL,
)


def blanked(data: bytes, headers: Iterable[tuple[str, str]] = ()) -> str:
    """Give bytes as a text without secrets; what is no UTF-8 is escaped.

    Args:
        data: the begin of what was sent.
        headers: it came with, in small letters; what these show is blanked wherever it stands.
    """
    for name, value in headers:
        if name == "content-type" and value.lower().startswith(_FORM):
            data = _read_form(data)
        if _SECRET.search(name.lower().encode("latin-1", "replace")):
            for shown in {value, value.partition(" ")[2].strip()}:
                if len(shown) >= _LEAST_KNOWN:
                    data = data.replace(shown.encode("latin-1", "replace"), _BLANK)
    data = _ESCAPED.sub(_unescaped, data)
    for names in (_NAMES, _TOLD_NAMES, _PART_WITH_TYPE):
        data = _without_named(data, names)
    return _KEYS.sub(_BLANK, data).decode("utf-8", "backslashreplace")


def _unescaped(found: re.Match[bytes]) -> bytes:
    """Give a letter, a digit or a sign for its escape; of signs only those of texts in JSON, and these escaped."""
    char = bytes.fromhex(found[2].decode())
    if char.isalnum() or char in b"_-":
        return char
    if found["form"] is not None or char in b"#$%":
        return found[0]
    return b"\\" + char if char == b'"' else char


def _read_form(data: bytes) -> bytes:
    """Undo what forms escape; values of names that are secret are blanked before, for these may have signs in them."""
    fields = []
    for field in data.replace(b"+", b" ").split(b"&"):
        name, sign, value = field.partition(b"=")
        read = unquote_to_bytes(name) if b"%" in name else name
        lower = read.lower()
        if _SECRET.search(lower) and not (_COUNTED.search(lower) and value.isdigit()):
            fields.append(read + sign + _BLANK)
        else:
            fields.append(read + sign + (unquote_to_bytes(value) if b"%" in value else value))
    return b"&".join(fields)


def _without_named(data: bytes, names: re.Pattern[bytes]) -> bytes:
    """Blank the values that follow names, with all that is in them."""
    parts: list[bytes] = []
    done = 0
    # Patterns of small letters are found much faster than such as leave the case open.
    for name in names.finditer(data.lower()):
        start = name.end()
        if name.start() < done:
            continue
        end = end_of_value(data, name, counts=_COUNTED.search(name["word"]) is not None)
        if end > start:
            parts += data[done:start], _stand_in(data, start, end, name)
            done = end
    return b"".join([*parts, data[done:]])


def _stand_in(data: bytes, start: int, end: int, name: re.Match[bytes]) -> bytes:
    """Give what is shown for a value, in the quotes that it had, or that its name has where it has several values."""
    quote = re.match(rb"\\*[\"']", data[start:end])
    if quote is not None:
        return quote[0] + _BLANK + (quote[0] if data[start + 1 : end].endswith(quote[0]) else b"")
    if data[start : start + 1] in {b"[", b"{"}:
        mark: bytes = name.groupdict().get("quote") or b""
        return mark + _BLANK + mark
    return _BLANK
