"""The parts of a form that was sent as ``multipart/form-data``."""

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
# Texts in the charsets that their senders name
# ----------------------------------------------------------------------

_SLOW: Final = frozenset({"idna", "punycode"})
"""Of names of hosts; Python takes time by the square of a text's length for them."""


def decoded(data: bytes, charset: str) -> str:
    """Give a text that can be written in UTF-8 again, in time that grows with its length.

    Raises:
        LookupError: there is no such charset of texts.
        ValueError: the text is not in it, or has halves of letters.
    """
    if codecs.lookup(charset).name in _SLOW:
        raise LookupError(f"unknown encoding: {charset}")
    text = data.decode(charset)
    if not text.isascii():
        text.encode()
    return text


# ----------------------------------------------------------------------
# The parts of a form that was sent as ``multipart/form-data``
# ----------------------------------------------------------------------

_DEFAULT_CHARSET: Final = "utf-8"
_MOST_HEADERS: Final = 8192
"""Bytes of a part's headers; what reads them takes time by the square of their length."""
_PIECE_BYTES: Final = 256 * 1024
"""Bytes that are looked through at once, in a few milliseconds."""
_BLANK_LINE: Final = re.compile(rb"\r\n\r\n|\r\r|\n\n")


class FormPart(NamedTuple):
    """One part: a field, whose ``text`` says what it is, or a file of a name, with its headers in lower case."""

    name: str
    content: bytes = b""
    text: str = ""
    filename: str | None = None
    headers: Headers = ()


def form_parts(
    content_type: str, body: bytes, *, most: int | None = None, piece_bytes: int = _PIECE_BYTES
) -> Iterator[FormPart]:
    """Read the parts of a form.

    Args:
        content_type: as it was sent, because the boundary in it is not without case.
        body: the form.
        most: how many parts it may have; None for any number.
        piece_bytes: how many bytes are searched for boundaries at once, while other threads wait.

    Raises:
        MalformedPayload: it cannot be parsed, there is no boundary, or there are too many parts, or headers of one.
    """
    options = parse_options_header(content_type)[1]
    boundary = options.get("boundary", "")
    if not boundary:
        raise MalformedPayload("a multipart form needs a boundary in its content-type, found none")
    try:
        yield from _parts(boundary.encode("latin-1"), body, options.get("charset", _DEFAULT_CHARSET), most, piece_bytes)
    except (LookupError, ValueError) as error:
        raise MalformedPayload(f"the multipart form cannot be parsed: {error}") from error


def _parts(boundary: bytes, body: bytes, charset: str, most: int | None, piece_bytes: int) -> Iterator[FormPart]:
    part: Field | File | None = None
    content: list[bytes] = []
    count = 0
    for event in _events(MultipartDecoder(boundary), body, piece_bytes):
        if isinstance(event, Field | File):
            part, content, count = event, [], count + 1
            if most is not None and count > most:
                raise ValueError(f"it has more than {most} parts")
        elif isinstance(event, Data) and part is not None:
            content.append(event.data)
            if not event.more_data:
                yield _part(part, b"".join(content), charset)


def _events(decoder: MultipartDecoder, body: bytes, piece_bytes: int) -> Iterator[Event]:
    """Give what a form consists of; it is looked through bit by bit, in between which other threads have their turn."""
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
    """Tell where a piece ends: the decoder must have the line of a boundary, and the line's end before it, at once."""
    end = start + piece_bytes
    while start < end < len(body):
        at = body.rfind(mark, max(0, start - len(mark)), end)
        if at < 0 or body[at + len(mark) : end].strip(b"- \t\v\f\r\n"):
            return end
        end = at - 2
    return len(body)


def _next_event(decoder: MultipartDecoder) -> Event:
    is_long = decoder.state is State.PART and len(decoder.buffer) > _MOST_HEADERS
    if is_long and _BLANK_LINE.search(decoder.buffer, 0, _MOST_HEADERS) is None:
        raise ValueError(f"the headers of a part have more than {_MOST_HEADERS} bytes")
    return decoder.next_event()


def _part(part: Field | File, content: bytes, charset: str) -> FormPart:
    # The decoder promises a name, but gives None where the client sent none.
    if not isinstance(part.name, str):
        raise ValueError("a part has no name")  # noqa: TRY004 - of the client's bytes, not of types
    if isinstance(part, Field):
        return FormPart(part.name, text=decoded(content, charset))
    headers = tuple((name.lower(), value) for name, value in part.headers)
    return FormPart(part.name, content, filename=part.filename, headers=headers)
