"""Values of HTTP methods: arguments from requests, and responses from results.

The classes have the names and methods of Starlette's, without requiring Starlette.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Generic, Self, TypeVar
from urllib.parse import parse_qsl, urlencode

import trio

from ovmstrio.core.errors import MalformedPayload, ServerError, UserCodeError
from ovmstrio.core.http_messages import ByteStream, Headers, HttpAnswer, HttpRequest
from ovmstrio.encoding.json_reader import (
    MAX_MEMBERS,
    USER_DOCUMENT,
    JsonLimitExceeded,
    JsonSyntaxError,
    parse_as_python,
    parse_json,
)
from ovmstrio.encoding.multipart import FormPart, decoded, form_parts
from ovmstrio.handlers.http_responses import HTTPError, Response, StreamingResponse, convert_starlette_response

if TYPE_CHECKING:
    from ovmstrio.handlers.handler_calls import HandlerCalls

# ----------------------------------------------------------------------
# Arguments
# ----------------------------------------------------------------------

_V = TypeVar("_V")


class UploadFile:
    """Uploaded file of a form, in memory; ``async def`` handlers can use the asynchronous methods.

    Attributes:
        filename: as sent by the client.
        file: content, opened for reading.
        size: in bytes.
        headers: of the file's part of the form.
    """

    def __init__(self, content: bytes, filename: str, headers: Headers = ()) -> None:
        self.filename = filename
        self.file: BinaryIO = BytesIO(content)
        self.size = len(content)
        self.headers = dict(headers)

    @property
    def content_type(self) -> str | None:
        """Content type sent by the client."""
        return self.headers.get("content-type")

    def __repr__(self) -> str:
        return f"UploadFile(filename={self.filename!r}, size={self.size}, content_type={self.content_type!r})"

    async def read(self, size: int = -1) -> bytes:
        """Read up to ``size`` bytes; all by default."""
        await trio.lowlevel.checkpoint()
        return self.file.read(size)

    async def seek(self, offset: int) -> None:
        """Set the position in the content."""
        await trio.lowlevel.checkpoint()
        self.file.seek(offset)

    async def write(self, data: bytes) -> None:
        """Write at the current position."""
        await trio.lowlevel.checkpoint()
        self.file.write(data)

    async def close(self) -> None:
        """Release the content."""
        self.file.close()


class MultiDict(Mapping[str, _V], Generic[_V]):
    """Mapping that returns the last of several values of a key; :meth:`getlist` returns all."""

    def __init__(self, pairs: Iterable[tuple[str, _V]] = ()) -> None:
        self._pairs = list(pairs)
        self._last = dict(self._pairs)

    def __getitem__(self, key: str) -> _V:
        return self._last[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._last)

    def __len__(self) -> int:
        return len(self._last)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._pairs!r})"

    def getlist(self, key: str) -> list[_V]:
        """Return all values of a key."""
        return [value for each, value in self._pairs if each == key]

    def multi_items(self) -> list[tuple[str, _V]]:
        """Return all key-value pairs in order."""
        return list(self._pairs)


class QueryParams(MultiDict[str]):
    """Parsed query string of a URL."""

    def __init__(self, query: str = "") -> None:
        super().__init__(parse_qsl(query, keep_blank_values=True))

    def __str__(self) -> str:
        return urlencode(self._pairs)


class FormData(MultiDict[str | UploadFile]):
    """Fields of a form: text or uploaded files."""

    async def close(self) -> None:
        """Close the files."""
        for _, value in self._pairs:
            if isinstance(value, UploadFile):
                await value.close()


class RequestHeaders(Mapping[str, str]):
    """Request headers; lookup is case-insensitive, and names are returned in lower case."""

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self._pairs = [(name.lower(), value) for name, value in pairs]
        self._first: dict[str, str] = {}
        for name, value in self._pairs:
            self._first.setdefault(name, value)

    def __getitem__(self, name: str) -> str:
        return self._first[name.lower()]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._first

    def __iter__(self) -> Iterator[str]:
        return iter(self._first)

    def __len__(self) -> int:
        return len(self._first)

    def __repr__(self) -> str:
        return f"RequestHeaders({self._pairs!r})"

    def getlist(self, name: str) -> list[str]:
        """Return all values of a name."""
        wanted = name.lower()
        return [value for each, value in self._pairs if each == wanted]

    @property
    def raw(self) -> list[tuple[bytes, bytes]]:
        """All name-value pairs as bytes."""
        return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self._pairs]


_TEXT_HEADER: Final = ("content-type", "text/plain; charset=utf-8")
_JSON_HEADER: Final = ("content-type", "application/json")
_NO_BODY: Final = frozenset({204, 304})


def text_response(status: int, text: str) -> HttpAnswer:
    """Create a plain-text response."""
    return HttpAnswer(status, (_TEXT_HEADER,), text.encode("utf-8", "replace"))


def wants_json(accept: str | None) -> bool:
    """Return whether the ``Accept`` header contains JSON and no text type."""
    return accept is not None and _JSON_HEADER[1] in accept and "text/" not in accept


def server_error_response(status: int, text: str, *, as_json: bool) -> HttpAnswer:
    """Create the response to an error of the server."""
    if as_json:
        return HttpAnswer(status, (_JSON_HEADER,), json.dumps({"error": text}).encode())
    return text_response(status, text)


def error_response(
    error: ServerError | HTTPError, status: int, *, shows_details: bool = False, as_json: bool = False
) -> HttpAnswer:
    """Create the response to a failed request.

    ``status`` applies to server errors; an ``HTTPError`` has its own. With ``shows_details``, the response includes
    type, message and line of a user error. ``as_json`` does not apply to the text of an ``HTTPError``.
    """
    if isinstance(error, HTTPError):
        return _http_error_answer(error)
    if isinstance(error, MalformedPayload) and error.is_json:
        as_json = True
    text = error.message
    if isinstance(error, UserCodeError) and shows_details and error.detail:
        text = f"{text}: {error.detail}"
    return server_error_response(status, text, as_json=as_json)


def _http_error_answer(error: HTTPError) -> HttpAnswer:
    extra = tuple((name.lower(), value) for name, value in error.headers.items())
    # These statuses never have a body.
    if error.status_code in _NO_BODY:
        return HttpAnswer(error.status_code, extra)
    kind = () if any(name == "content-type" for name, _ in extra) else (_TEXT_HEADER,)
    return HttpAnswer(error.status_code, (*kind, *extra), error.detail.encode("utf-8", "replace"))


# Forms, in Starlette's classes if installed

_DEFAULT_CHARSET: Final = "utf-8"
_JSON_TYPE: Final = "application/json"
_TEXT_TYPE: Final = "text/plain"
_MULTIPART: Final = "multipart/form"
_URLENCODED: Final = "application/x-www-form-urlencoded"
_MAX_URLENCODED_BYTES: Final = 1024 * 1024
_MAX_PARTS: Final = 4_096
"""Maximum number of parts of a multipart form; parsing a part takes 20 us."""
_MAX_INLINE_BYTES: Final = 16 * 1024
"""Larger payloads are parsed in a thread: a form of this size with many small fields takes milliseconds."""


def urlencoded_form(body: bytes) -> Any:
    """Parse ``application/x-www-form-urlencoded``; undecodable bytes are read as Latin-1.

    Raises MalformedPayload if the form is too large or has too many fields.
    """
    if len(body) > _MAX_URLENCODED_BYTES:
        raise MalformedPayload(
            f"expected a form of at most {_MAX_URLENCODED_BYTES} bytes, got {len(body)}; send multipart/form-data"
        )
    try:
        return _form(parse_qsl(body.decode("latin-1"), keep_blank_values=True, max_num_fields=MAX_MEMBERS))
    except ValueError:
        raise MalformedPayload(f"expected at most {MAX_MEMBERS} fields in a form, got more") from None


def multipart_form(content_type: str, body: bytes) -> Any:
    """Parse ``multipart/form-data``; the boundary in ``content_type`` is case-sensitive.

    Raises MalformedPayload if the form is malformed, or the boundary is missing.
    """
    return _form([(part.name, _field_value(part)) for part in form_parts(content_type, body, limit=_MAX_PARTS)])


def _field_value(part: FormPart) -> Any:
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
    try:
        import starlette.datastructures as classes  # noqa: PLC0415 - loaded only when a form is parsed
    except ImportError:
        return None
    return classes


async def http_arguments(wanted: frozenset[str], request: HttpRequest) -> dict[str, Any]:
    """Create the arguments that a method accepts; large payloads are parsed in a worker thread.

    Raises MalformedPayload if the body does not match its content type.
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
    kind = (given or "").lower()
    if len(body) <= _MAX_INLINE_BYTES or not kind.startswith((_JSON_TYPE, _TEXT_TYPE, _MULTIPART, _URLENCODED)):
        return parse_payload(given, body)
    if not kind.startswith(_JSON_TYPE):
        return await trio.to_thread.run_sync(parse_payload, given, body)
    try:
        return await parse_json(body, USER_DOCUMENT, parse=parse_as_python)
    except (JsonSyntaxError, JsonLimitExceeded) as error:
        raise MalformedPayload(str(error), is_json=True) from error


_CHARSET: Final = re.compile(r"charset=\s*[\"']?([^\s;\"']+)")


def parse_payload(content_type: str | None, body: bytes) -> Any:
    """Parse a request body by its content type.

    ===================================== ==============================================
    content type starts with              payload
    ===================================== ==============================================
    ``application/json``                  JSON value, ``NaN`` and infinities included
    ``text/plain``                        text, in UTF-8 or the given ``charset``
    ``multipart/form``                    form with text and uploaded files
    ``application/x-www-form-urlencoded`` form with text
    other or none                         bytes
    ===================================== ==============================================

    Raises:
        MalformedPayload: the body does not match its content type.
    """
    given = content_type or ""
    kind = given.lower()
    if kind.startswith(_JSON_TYPE):
        return _parsed_json(body)
    if kind.startswith(_TEXT_TYPE):
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


# ----------------------------------------------------------------------
# Results
# ----------------------------------------------------------------------

# Starlette's responses and errors, from handlers that import Starlette


# Conversion of results

_BYTES: Final = "application/octet-stream"
_TEXT: Final = "text/plain; charset=utf-8"
_JSON: Final = "application/json"
_LINES: Final = "application/x-ndjson"


async def to_response(result: Any, handler: HandlerCalls, method: str) -> HttpAnswer:
    """Convert the result of a method to a response; the caller closes a streamed body.

    Raises:
        UserCodeError: the result cannot be sent, or its generator raised before the first value; this has been logged.
        HTTPError: raised by the generator before the first value.
    """
    if isinstance(result, tuple) and len(result) == 2 and callable(result[1]):  # noqa: PLR2004 - result and callback
        return (await to_response(result[0], handler, method)).followed_by(result[1])
    if isinstance(result, Iterator | AsyncIterator):
        return await _stream_values(result, handler, method)
    try:
        return await convert_starlette_response(result, handler.stream, method) or _buffered(result, handler, method)
    except (TypeError, ValueError, RecursionError, OSError) as error:
        raise handler.convert_error(error, method) from None


def _buffered(result: Any, handler: HandlerCalls, method: str) -> HttpAnswer:
    if isinstance(result, bytes | bytearray | memoryview):
        return _ok(_BYTES, bytes(result))
    if isinstance(result, str):
        return _ok(_TEXT, result.encode())
    if isinstance(result, Response):
        return _response(result, handler, method)
    return _ok(_JSON, _encode_json(result))


def _response(response: Response, handler: HandlerCalls, method: str) -> HttpAnswer:
    after = () if response.background is None else (response.background,)
    body: bytes | ByteStream = response.body
    if isinstance(response, StreamingResponse):
        chunks = response.chunks
        values = aiter(chunks) if isinstance(chunks, AsyncIterable) else iter(chunks)
        body = handler.stream(values, _encode, method)
    return HttpAnswer(response.status_code, response.header_pairs(), body, after)


def _ok(kind: str, body: bytes | ByteStream) -> HttpAnswer:
    return HttpAnswer(200, (("content-type", kind),), body)


def _encode_json(value: Any) -> bytes:
    return _JSON_ENCODER.encode(value).encode()


def _array_to_list(value: Any) -> Any:
    try:
        return value.tolist()
    except AttributeError:
        raise TypeError(f"an object of type {type(value).__name__!r} is not JSON serializable") from None


_JSON_ENCODER: Final = json.JSONEncoder(default=_array_to_list)


# Streams


async def _stream_values(values: Any, handler: HandlerCalls, method: str) -> HttpAnswer:
    chunks = _Chunks()
    stream = handler.stream(values, chunks.encode, method)
    try:
        first = await anext(stream)
    except StopAsyncIteration:
        return _ok(_BYTES, b"")
    except BaseException:
        await stream.aclose()
        raise
    return _ok(chunks.kind, _StartedStream(first, stream))


def _encode(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    return _encode_json(value) + b"\n"


class _Chunks:
    def __init__(self) -> None:
        self.kind = ""

    def encode(self, value: Any) -> bytes:
        if not self.kind:
            is_bytes = isinstance(value, bytes | bytearray | memoryview)
            self.kind = _TEXT if isinstance(value, str) else _BYTES if is_bytes else _LINES
        return _encode(value)


class _StartedStream:
    def __init__(self, first: bytes, rest: ByteStream) -> None:
        self._first: bytes | None = first
        self._rest = rest

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        first, self._first = self._first, None
        return await anext(self._rest) if first is None else first

    async def aclose(self) -> None:
        await self._rest.aclose()
