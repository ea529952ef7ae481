"""Forms: fields and files, in Starlette's classes where that is installed, else in look-alikes."""

from __future__ import annotations

import json
import re
from functools import cache
from io import BytesIO
from typing import Any, Final
from urllib.parse import parse_qsl

import trio

from ovmstrio.core.charsets import decoded
from ovmstrio.core.errors import MalformedPayload
from ovmstrio.core.http import Headers, HttpRequest
from ovmstrio.core.multipart import FormPart, form_parts
from ovmstrio.runtimes.handlers.http.values import FormData, QueryParams, RequestHeaders, UploadFile
from ovmstrio.util.json_reader import (
    MAX_MEMBERS,
    USER_DOCUMENT,
    JsonLimitExceeded,
    JsonSyntaxError,
    parse_as_python,
    parse_json,
)

__all__ = ["http_arguments", "multipart_form", "parse_payload", "urlencoded_form"]

_DEFAULT_CHARSET: Final = "utf-8"
_JSON: Final = "application/json"
_TEXT: Final = "text/plain"
_MULTIPART: Final = "multipart/form"
_URLENCODED: Final = "application/x-www-form-urlencoded"
_MOST_URLENCODED_BYTES: Final = 1024 * 1024
_MAX_PARTS: Final = 4_096
"""Parts of a multipart form; each takes 20 microseconds."""
_AT_ONCE_BYTES: Final = 16 * 1024
"""Of a form of many small fields, which takes milliseconds; larger ones are read beside the event loop."""


def urlencoded_form(body: bytes) -> Any:
    """Parse ``application/x-www-form-urlencoded``; bytes that are no text become what Latin-1 has for them.

    Raises:
        MalformedPayload: the form is larger than such a form may be, or has too many fields.
    """
    if len(body) > _MOST_URLENCODED_BYTES:
        raise MalformedPayload(
            f"expected a form of at most {_MOST_URLENCODED_BYTES} bytes, got {len(body)}; send multipart/form-data"
        )
    try:
        return _form(parse_qsl(body.decode("latin-1"), keep_blank_values=True, max_num_fields=MAX_MEMBERS))
    except ValueError:
        raise MalformedPayload(f"expected at most {MAX_MEMBERS} fields in a form, got more") from None


def multipart_form(content_type: str, body: bytes) -> Any:
    """Parse ``multipart/form-data``.

    Args:
        content_type: as it was sent, because the boundary in it is not without case.
        body: the form.

    Raises:
        MalformedPayload: it cannot be parsed, or there is no boundary.
    """
    return _form([(part.name, _value(part)) for part in form_parts(content_type, body, most=_MAX_PARTS)])


def _value(part: FormPart) -> Any:
    return part.text if part.filename is None else _upload(part.content, part.filename, part.headers)


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


async def http_arguments(wanted: frozenset[str], request: HttpRequest) -> dict[str, Any]:
    """Make the arguments that a method wants; a large payload is read in a worker thread.

    Raises:
        MalformedPayload: it wants the payload, which is not what its content type says.

    Cancellation: before a thread reads a form, and between slices of large JSON.
    """
    made: dict[str, Any] = {}
    if "payload" in wanted:
        given, body = request.header("content-type"), request.body
        made["payload"] = await _read_payload(given, body)
    if "headers" in wanted:
        made["headers"] = RequestHeaders(request.headers)
    if "query_params" in wanted:
        made["query_params"] = QueryParams(request.query)
    return made


async def _read_payload(given: str | None, body: bytes) -> Any:
    """Read a payload as :func:`parse_payload`, in a worker thread if that may take long."""
    kind = (given or "").lower()
    if len(body) <= _AT_ONCE_BYTES or not kind.startswith((_JSON, _TEXT, _MULTIPART, _URLENCODED)):
        return parse_payload(given, body)
    if not kind.startswith(_JSON):
        return await trio.to_thread.run_sync(parse_payload, given, body)
    try:
        return await parse_json(body, USER_DOCUMENT, parse=parse_as_python)
    except (JsonSyntaxError, JsonLimitExceeded) as error:
        raise MalformedPayload(str(error), is_json=True) from error


_CHARSET: Final = re.compile(r"charset=\s*[\"']?([^\s;\"']+)")


def parse_payload(content_type: str | None, body: bytes) -> Any:
    """Give what a handler gets as ``payload``.

    ===================================== ==========================================
    content type begins with              payload
    ===================================== ==========================================
    ``application/json``                  any JSON value; ``NaN`` and infinities, too
    ``text/plain``                        text, in UTF-8 or the ``charset`` given
    ``multipart/form``                    a form of text and uploaded files
    ``application/x-www-form-urlencoded`` a form of text
    anything else, or nothing             the bytes
    ===================================== ==========================================

    Raises:
        MalformedPayload: the body is not what its content type says.
    """
    given = content_type or ""
    kind = given.lower()
    if kind.startswith(_JSON):
        return _parsed_json(body)
    if kind.startswith(_TEXT):
        return _decoded(kind, body)
    if kind.startswith(_MULTIPART):
        return multipart_form(given, body)
    if kind.startswith(_URLENCODED):
        return urlencoded_form(body)
    return body


def _parsed_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError as error:
        raise MalformedPayload(str(error), is_json=True) from error
    except RecursionError as error:
        raise MalformedPayload("the JSON is nested too deeply", is_json=True) from error


def _decoded(kind: str, body: bytes) -> str:
    charsets = _CHARSET.findall(kind)
    charset = charsets[-1] if charsets else _DEFAULT_CHARSET
    try:
        return decoded(body, charset)
    except (LookupError, ValueError) as error:
        raise MalformedPayload(f"the text is not in {charset}: {error}") from error
