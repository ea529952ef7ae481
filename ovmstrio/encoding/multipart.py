"""Parser of ``multipart/form-data`` bodies."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import NEED_DATA, Data, Epilogue, Event, Field, File, MultipartDecoder, State

from ovmstrio.core.errors import MalformedPayload
from ovmstrio.core.http_messages import Headers

# ----------------------------------------------------------------------
# Charsets of texts
# ----------------------------------------------------------------------

_SLOW: Final = frozenset({"idna", "punycode"})
"""Codecs of host names, whose decoding time in Python is quadratic."""


def decoded(data: bytes, charset: str) -> str:
    """Decode text in linear time; the result can be encoded as UTF-8.

    Raises:
        LookupError: the charset is unknown.
        ValueError: the data is not in the charset, or contains unpaired surrogates.
    """
    if codecs.lookup(charset).name in _SLOW:
        raise LookupError(f"unknown encoding: {charset}")
    text = data.decode(charset)
    if not text.isascii():
        text.encode()
    return text


# ----------------------------------------------------------------------
# Parts of forms
# ----------------------------------------------------------------------

_DEFAULT_CHARSET: Final = "utf-8"
_MAX_HEADER_BYTES: Final = 8192
"""Size limit of a part's headers, whose parsing time is quadratic."""
_PIECE_BYTES: Final = 256 * 1024
"""Bytes that are searched at once, in a few milliseconds."""
_BLANK_LINE: Final = re.compile(rb"\r\n\r\n|\r\r|\n\n")


class FormPart(NamedTuple):
    """A part of a form: a field with its value in ``text``, or a file with its content and lower-case headers."""

    name: str
    content: bytes = b""
    text: str = ""
    filename: str | None = None
    headers: Headers = ()


def form_parts(
    content_type: str, body: bytes, *, limit: int | None = None, piece_bytes: int = _PIECE_BYTES
) -> Iterator[FormPart]:
    """Parse the parts of a form.

    Args:
        content_type: the unchanged header, because its boundary is case-sensitive.
        body: the form.
        limit: the maximum number of parts; None for no limit.
        piece_bytes: the number of bytes that are searched for boundaries at once, while other threads wait.

    Raises:
        MalformedPayload: the form cannot be parsed, has no boundary or too many parts, or a part has too many headers.
    """
    options = parse_options_header(content_type)[1]
    boundary = options.get("boundary", "")
    if not boundary:
        raise MalformedPayload("a multipart form needs a boundary in its content-type, found none")
    try:
        yield from _parts(
            boundary.encode("latin-1"), body, options.get("charset", _DEFAULT_CHARSET), limit, piece_bytes
        )
    except (LookupError, ValueError) as error:
        raise MalformedPayload(f"the multipart form cannot be parsed: {error}") from error


def _parts(boundary: bytes, body: bytes, charset: str, limit: int | None, piece_bytes: int) -> Iterator[FormPart]:
    part: Field | File | None = None
    content: list[bytes] = []
    count = 0
    for event in _events(MultipartDecoder(boundary), body, piece_bytes):
        if isinstance(event, Field | File):
            part, content, count = event, [], count + 1
            if limit is not None and count > limit:
                raise ValueError(f"expected at most {limit} parts, got more")
        elif isinstance(event, Data) and part is not None:
            content.append(event.data)
            if not event.more_data:
                yield _part(part, b"".join(content), charset)


def _events(decoder: MultipartDecoder, body: bytes, piece_bytes: int) -> Iterator[Event]:
    """Parse a form in pieces, so that other threads run in between."""
    end = 0
    while end < len(body):
        start, end = end, _end_of_piece(body, end, piece_bytes, b"--" + decoder.boundary)
        decoder.receive_data(body[start:end])
        while (event := _next_event(decoder)) is not NEED_DATA:
            yield event
    decoder.receive_data(None)
    while not isinstance(event := decoder.next_event(), Epilogue):
        yield event


def _end_of_piece(body: bytes, start: int, piece_bytes: int, mark: bytes) -> int:
    """Return the end of a piece, which splits neither a boundary line nor the line break before the line."""
    end = start + piece_bytes
    while start < end < len(body):
        at = body.rfind(mark, max(0, start - len(mark)), end)
        if at < 0 or body[at + len(mark) : end].strip(b"- \t\v\f\r\n"):
            return end
        end = at - 2
    return len(body)


def _next_event(decoder: MultipartDecoder) -> Event:
    is_long = decoder.state is State.PART and len(decoder.buffer) > _MAX_HEADER_BYTES
    if is_long and _BLANK_LINE.search(decoder.buffer, 0, _MAX_HEADER_BYTES) is None:
        raise ValueError(f"the headers of a part have more than {_MAX_HEADER_BYTES} bytes")
    return decoder.next_event()


def _part(part: Field | File, content: bytes, charset: str) -> FormPart:
    # The name is typed as str, but is None if the client sent none.
    if not isinstance(part.name, str):
        raise ValueError("a part has no name")  # noqa: TRY004 - the client's error
    if isinstance(part, Field):
        return FormPart(part.name, text=decoded(content, charset))
    headers = tuple((name.lower(), value) for name, value in part.headers)
    return FormPart(part.name, content, filename=part.filename, headers=headers)
