"""Forms: fields and files, in Starlette's classes where that is installed, else in look-alikes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from io import BytesIO
from typing import Any, Final
from urllib.parse import parse_qsl

from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder

from ovmstrio.core.errors import MalformedPayload
from ovmstrio.core.http import Headers
from ovmstrio.runtimes.handlers.http.uploads import UploadFile
from ovmstrio.runtimes.handlers.http.values import FormData

__all__ = ["multipart_form", "urlencoded_form"]

_DEFAULT_CHARSET: Final = "utf-8"


def urlencoded_form(body: bytes) -> Any:
    """Parse ``application/x-www-form-urlencoded``; bytes that are no text become what Latin-1 has for them."""
    return _form(parse_qsl(body.decode("latin-1"), keep_blank_values=True))


def multipart_form(content_type: str, body: bytes) -> Any:
    """Parse ``multipart/form-data``.

    Args:
        content_type: as it was sent, because the boundary in it is not without case.
        body: the form.

    Raises:
        MalformedPayload: it cannot be parsed, or there is no boundary.
    """
    options = parse_options_header(content_type)[1]
    boundary = options.get("boundary", "")
    if not boundary:
        raise MalformedPayload("a multipart form needs a boundary in its content-type, found none")
    try:
        return _form(list(_parts(boundary.encode("latin-1"), body, options.get("charset", _DEFAULT_CHARSET))))
    except (LookupError, ValueError) as error:
        raise MalformedPayload(f"the multipart form cannot be parsed: {error}") from error


def _parts(boundary: bytes, body: bytes, charset: str) -> Iterator[tuple[str, Any]]:
    decoder = MultipartDecoder(boundary)
    decoder.receive_data(body)
    decoder.receive_data(None)
    part: Field | File | None = None
    content: list[bytes] = []
    while not isinstance(event := decoder.next_event(), Epilogue):
        if isinstance(event, Field | File):
            part, content = event, []
        elif isinstance(event, Data) and part is not None:
            content.append(event.data)
            if not event.more_data:
                yield _part(part, b"".join(content), charset)


def _part(part: Field | File, content: bytes, charset: str) -> tuple[str, Any]:
    # The decoder promises a name, but gives None where the client sent none.
    if not isinstance(part.name, str):
        raise ValueError("a part has no name")  # noqa: TRY004 - of the client's bytes, not of types
    if isinstance(part, Field):
        return part.name, content.decode(charset)
    headers = tuple((name.lower(), value) for name, value in part.headers)
    return part.name, _upload(content, part.filename, headers)


def _upload(content: bytes, filename: str, headers: Headers) -> Any:
    classes = _starlette()
    if classes is None:
        return UploadFile(content, filename, headers)
    raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers]
    kinds = classes.Headers(raw=raw)
    return classes.UploadFile(file=BytesIO(content), size=len(content), filename=filename, headers=kinds)


def _form(pairs: list[tuple[str, Any]]) -> Any:
    classes = _starlette()
    return FormData(pairs) if classes is None else classes.FormData(pairs)


@cache
def _starlette() -> Any:
    """Give the module with Starlette's classes, once, or None where it is not installed."""
    try:
        import starlette.datastructures as classes  # noqa: PLC0415 - loaded only when a form is parsed
    except ImportError:
        return None
    return classes
