"""The parts of a form that was sent as ``multipart/form-data``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder

from ovmstrio.core.errors import MalformedPayload
from ovmstrio.core.http import Headers

__all__ = ["FormPart", "form_parts"]

_DEFAULT_CHARSET: Final = "utf-8"


class FormPart(NamedTuple):
    """One part: a field, whose ``text`` says what it is, or a file of a name, with its headers in lower case."""

    name: str
    content: bytes = b""
    text: str = ""
    filename: str | None = None
    headers: Headers = ()


def form_parts(content_type: str, body: bytes, *, most: int | None = None) -> Iterator[FormPart]:
    """Read the parts of a form.

    Args:
        content_type: as it was sent, because the boundary in it is not without case.
        body: the form.
        most: how many parts it may have; None for any number.

    Raises:
        MalformedPayload: it cannot be parsed, there is no boundary, or there are too many parts.
    """
    options = parse_options_header(content_type)[1]
    boundary = options.get("boundary", "")
    if not boundary:
        raise MalformedPayload("a multipart form needs a boundary in its content-type, found none")
    try:
        yield from _parts(boundary.encode("latin-1"), body, options.get("charset", _DEFAULT_CHARSET), most)
    except (LookupError, ValueError) as error:
        raise MalformedPayload(f"the multipart form cannot be parsed: {error}") from error


def _parts(boundary: bytes, body: bytes, charset: str, most: int | None) -> Iterator[FormPart]:
    decoder = MultipartDecoder(boundary)
    decoder.receive_data(body)
    decoder.receive_data(None)
    part: Field | File | None = None
    content: list[bytes] = []
    count = 0
    while not isinstance(event := decoder.next_event(), Epilogue):
        if isinstance(event, Field | File):
            part, content, count = event, [], count + 1
            if most is not None and count > most:
                raise ValueError(f"it has more than {most} parts")
        elif isinstance(event, Data) and part is not None:
            content.append(event.data)
            if not event.more_data:
                yield _part(part, b"".join(content), charset)


def _part(part: Field | File, content: bytes, charset: str) -> FormPart:
    # The decoder promises a name, but gives None where the client sent none.
    if not isinstance(part.name, str):
        raise ValueError("a part has no name")  # noqa: TRY004 - of the client's bytes, not of types
    if isinstance(part, Field):
        return FormPart(part.name, text=content.decode(charset))
    headers = tuple((name.lower(), value) for name, value in part.headers)
    return FormPart(part.name, content, filename=part.filename, headers=headers)
