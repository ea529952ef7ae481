"""Redaction of secrets in request bodies that the server shows.

Two kinds of text are redacted: values with a secret name, in JSON (also JSON inside strings), forms, header lines,
markup and protobuf messages; and text that looks like a key or token, anywhere.  Other secrets cannot be recognised and
stay.  The time is linear in the size, because clients choose the bodies::

    body ─> escapes of letters and quotes ─> values of secret names ────────> keys and tokens ─> text
            \u0061, %61                      "password": ..., password=...    ovms_..., eyJ...
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote_to_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

# ----------------------------------------------------------------------
# The end of a value, in JSON, forms, header lines, markup, protobuf and multipart
# ----------------------------------------------------------------------

_QUOTE: Final = re.compile(rb"(?<!\\)(\\*+)([\"'])")
_QUOTES_AND_BRACKETS: Final = re.compile(rb"(?<!\\)\\*+\"|[\[\]{}]")
_NUMBER: Final = re.compile(rb"(?:-?\d[\d.eE+-]*|true|false|null)(?![\w-])")
_JSON: Final = re.compile(rb"[^\s,}\]\\\"']*")
_FIELD: Final = re.compile(rb"[^\s&\"'<>\\]*")
_LINE: Final = re.compile(rb"[^\r\n\"'<>\\]*")
_ELEMENT: Final = re.compile(rb"[^<]*")
_PART: Final = re.compile(rb".*?(?=\r\n--|\Z)", re.DOTALL)
_NAMES_WITH_SPACES: Final = re.compile(rb"authori|cookie")
"""Names of values that can contain spaces."""
_MAX_LENGTH_BYTES: Final = 5
_CONTINUATION_BIT: Final = 0x80


def end_of_value(data: bytes, name: re.Match[bytes], *, counts: bool) -> int:
    """Return the end of the value after a name.  A truncated value ends at the end of the data.

    Args:
        data: the data with the name and value.
        name: the match of the name with its separator.  Groups describe the syntax: ``word``, and ``quote``,
            ``markup``, ``message`` or ``part``.
        counts: numbers are kept: the end of a number is its start.
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
        end = _end_of_container(data, start, len(groups.get("quote") or b'"') - 1)
        has_texts = b'"' in data[start:end] or b"'" in data[start:end]
        return start if counts and not has_texts else end
    if groups.get("quote"):
        return _end(_JSON, data, start)
    takes_line = groups.get("sign") == b":" or _NAMES_WITH_SPACES.match(name["word"])
    return _end(_LINE if takes_line else _FIELD, data, start)


def _end(pattern: re.Pattern[bytes], data: bytes, start: int) -> int:
    found = pattern.match(data, start)
    return start if found is None else found.end()


def _end_of_text(data: bytes, opened: re.Match[bytes]) -> int:
    """Return the end of a string; the quotes of a string inside another string are escaped."""
    depth = len(opened[1])
    for quote in _QUOTE.finditer(data, opened.end()):
        escapes = len(quote[1])
        if quote[2] == opened[2] and (escapes <= depth if depth else escapes % 2 == 0):
            return quote.end()
    return len(data)


def _end_of_container(data: bytes, start: int, depth: int) -> int:
    """Return the end of an array or object whose strings have quotes with ``depth`` backslashes."""
    levels, is_text = 0, False
    for sign in _QUOTES_AND_BRACKETS.finditer(data, start):
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
    """Return the end of a protobuf message that begins with its length."""
    length = 0
    for number, byte in enumerate(data[start : start + _MAX_LENGTH_BYTES]):
        length |= (byte & ~_CONTINUATION_BIT) << (7 * number)
        if byte < _CONTINUATION_BIT:
            return min(len(data), start + number + 1 + length)
    return start


# ----------------------------------------------------------------------
# Redaction
# ----------------------------------------------------------------------

_REDACTED: Final = b"***"
_MIN_SECRET_BYTES: Final = 4
"""Minimum length of a secret header value that is redacted in the body."""
_FORM: Final = "application/x-www-form-urlencoded"

_WORDS: Final = (
    rb"secret|passw|passphrase|pwd|token|(?:api|access|account|shared|auth|encryption)[ _.-]?key|authori[sz]ation"
    rb"|credential|private|cookie|bearer|amz-signature"
)
_SECRET: Final = re.compile(_WORDS)
_COUNT_NAMES: Final = re.compile(rb"token")
"""Names of numbers that are counts, such as ``max_tokens``."""
_NAMES: Final = re.compile(
    rb"(?P<word>" + _WORDS + rb")[\w.\x80-\xff-]{0,64}+(?:[\w .\x80-\xff-]{1,64}(?=\\{0,16}[\"']))?"
    rb"(?P<quote>\\{0,16}[\"'])?\]?"
    rb"(?:[ \t\r\n]{0,32}(?P<sign>[:=])>?[ \t\r\n]{0,32}|(?P<markup>>)|(?P<message>\x12)|(?P<part>\r\n\r\n))"
)
"""Secret names before a value after a separator, a markup element, a protobuf message, or a form part."""
_NAMES_AS_VALUES: Final = re.compile(
    rb"(?P<quote>\\{0,16}[\"'])(?:name|key|header|field|id)\\{0,16}[\"']\s{0,8}(?P<sign>:)\s{0,8}\\{0,16}[\"']"
    rb"[^\"']{0,64}?(?P<word>" + _WORDS + rb")[^\"']{0,64}[\"'].{0,300}?"
    rb"[\"'](?:value|data|contents|string_param)\\{0,16}[\"']\s{0,8}:\s{0,8}",
    re.DOTALL,
)
"""Secret names that are JSON values themselves, such as tensor names."""
# No group is possessive: Python before 3.11.5 matches repeated possessive groups wrongly.
_PART_WITH_TYPE: Final = re.compile(
    rb"content-disposition:[^\r\n;]{0,64}; ?name=\"?[^\"\r\n;]{0,64}?(?P<word>" + _WORDS + rb")[^\r\n]{0,200}+"
    rb"(?:\r\n[^\r\n]{1,200}+){0,4}(?P<part>\r\n\r\n)"
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
    """Return bytes as text with secrets redacted; bytes that are not UTF-8 are escaped.

    Args:
        data: the start of the body.
        headers: the headers of the body, with lower-case names; their secrets are redacted everywhere in the body.
    """
    for name, value in headers:
        if name == "content-type" and value.lower().startswith(_FORM):
            data = _read_form(data)
        if _SECRET.search(name.lower().encode("latin-1", "replace")):
            for shown in {value, value.partition(" ")[2].strip()}:
                if len(shown) >= _MIN_SECRET_BYTES:
                    data = data.replace(shown.encode("latin-1", "replace"), _REDACTED)
    data = _ESCAPED.sub(_unescape, data)
    for names in (_NAMES, _NAMES_AS_VALUES, _PART_WITH_TYPE):
        data = _redact_named(data, names)
    return _KEYS.sub(_REDACTED, data).decode("utf-8", "backslashreplace")


def _unescape(found: re.Match[bytes]) -> bytes:
    """Unescape letters, digits, and the punctuation of JSON, in which a quote keeps a backslash."""
    char = bytes.fromhex(found[2].decode())
    if char.isalnum() or char in b"_-":
        return char
    if found["form"] is not None or char in b"#$%":
        return found[0]
    return b"\\" + char if char == b'"' else char


def _read_form(data: bytes) -> bytes:
    """Decode a form; secret values are redacted first, because decoded values may contain separators."""
    fields = []
    for field in data.replace(b"+", b" ").split(b"&"):
        name, sign, value = field.partition(b"=")
        read = unquote_to_bytes(name) if b"%" in name else name
        lower = read.lower()
        if _SECRET.search(lower) and not (_COUNT_NAMES.search(lower) and value.isdigit()):
            fields.append(read + sign + _REDACTED)
        else:
            fields.append(read + sign + (unquote_to_bytes(value) if b"%" in value else value))
    return b"&".join(fields)


def _redact_named(data: bytes, names: re.Pattern[bytes]) -> bytes:
    parts: list[bytes] = []
    done = 0
    # Matching lower-case patterns is much faster than ignoring case.
    for name in names.finditer(data.lower()):
        start = name.end()
        if name.start() < done:
            continue
        end = end_of_value(data, name, counts=_COUNT_NAMES.search(name["word"]) is not None)
        if end > start:
            parts += data[done:start], _replacement(data, start, end, name)
            done = end
    return b"".join([*parts, data[done:]])


def _replacement(data: bytes, start: int, end: int, name: re.Match[bytes]) -> bytes:
    """Return the replacement of a value, in its quotes; a container gets the quotes of its name."""
    quote = re.match(rb"\\*[\"']", data[start:end])
    if quote is not None:
        return quote[0] + _REDACTED + (quote[0] if data[start + 1 : end].endswith(quote[0]) else b"")
    if data[start : start + 1] in {b"[", b"{"}:
        mark: bytes = name.groupdict().get("quote") or b""
        return mark + _REDACTED + mark
    return _REDACTED
