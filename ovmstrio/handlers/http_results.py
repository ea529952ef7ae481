"""What handlers may return or raise to choose a status and headers; the names are those that Starlette has made known.

::

    from ovmstrio.ext.handlers import HTTPError, JSONResponse

    def handle_post(self, payload):
        if "text" not in payload:
            raise HTTPError(422, "the field text is missing")
        return JSONResponse({"length": len(payload["text"])}, status_code=201)
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, Self

import trio

from ovmstrio.core.http import ByteStream, Callback, Headers, HttpAnswer
from ovmstrio.util.regular_files import open_regular

__all__ = [
    "HTMLResponse",
    "HTTPError",
    "JSONResponse",
    "PlainTextResponse",
    "Response",
    "ResultBorder",
    "StreamingResponse",
    "starlette_answer",
    "starlette_error",
    "to_answer",
]

# ----------------------------------------------------------------------
# What handlers may return or raise to choose a status and headers; the names are those that Starlette has made known
# ----------------------------------------------------------------------


class HTTPError(Exception):
    """Ends a request with a status; raised by handlers.

    Args:
        status_code: of the answer.
        detail: its text; what the status is called by default.
        headers: more headers of the answer.
    """

    def __init__(self, status_code: int, detail: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        self.status_code = status_code
        self.detail = _phrase(status_code) if detail is None else detail
        self.headers = dict(headers or {})
        super().__init__(status_code, self.detail)

    def __str__(self) -> str:
        return f"{self.status_code}: {self.detail}"


class Response:
    """An answer whose status and headers are the handler's own.

    Args:
        content: the body.
        status_code: of the answer.
        headers: more headers of the answer.
        media_type: the content type; that of the class by default.
        background: runs after the answer.
    """

    media_type: ClassVar[str | None] = None

    def __init__(
        self,
        content: Any = None,
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str | None = None,
        background: Callable[[], Any] | None = None,
    ) -> None:
        self.status_code = status_code
        self.body = self.render(content)
        self.background = background
        self.headers = {name.lower(): value for name, value in (headers or {}).items()}
        kind = type(self).media_type if media_type is None else media_type
        if kind is not None:
            self.headers.setdefault("content-type", _with_charset(kind))

    def render(self, content: Any) -> bytes:
        """Make the body of the content.

        Raises:
            TypeError: it is neither text nor bytes.
        """
        if content is None:
            return b""
        if isinstance(content, str):
            return content.encode()
        if isinstance(content, bytes | bytearray | memoryview):
            return bytes(content)
        raise TypeError(f"the content of a {type(self).__name__} is text or bytes, got {type(content).__name__}")

    def header_pairs(self) -> Headers:
        """Give the headers as an answer has them; how long the body is, whoever writes it says."""
        return tuple((name, value) for name, value in self.headers.items() if name != "content-length")


class PlainTextResponse(Response):
    """An answer that is text."""

    media_type = "text/plain"


class HTMLResponse(Response):
    """An answer that is a page."""

    media_type = "text/html"


class JSONResponse(Response):
    """An answer that is JSON, of anything that ``json.dumps`` takes."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Write the content as JSON.

        Raises:
            TypeError: it cannot be written.
            ValueError: as above.
        """
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


class StreamingResponse(Response):
    """An answer whose body a generator makes while it is sent.

    Args:
        content: gives text or bytes; any iterable, asynchronous or not.
        status_code: of the answer.
        headers: more headers of the answer.
        media_type: the content type.
        background: runs after the answer.
    """

    def __init__(
        self,
        content: Iterable[Any] | AsyncIterable[Any],
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str | None = None,
        background: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__(None, status_code, headers, media_type, background)
        self.chunks = content

    def header_pairs(self) -> Headers:
        """Give the headers as an answer has them; the handler may know how long the body will be."""
        return tuple(self.headers.items())


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def _with_charset(media_type: str) -> str:
    is_text = media_type.startswith("text/") and "charset=" not in media_type.lower()
    return f"{media_type}; charset=utf-8" if is_text else media_type


# ----------------------------------------------------------------------
# Starlette's responses and errors, from handlers that import it; the server itself never does for this
# ----------------------------------------------------------------------

_CHUNK: Final = 64 * 1024
# Requests for parts of a file are not answered with parts.
_NOT_SENT: Final = frozenset({"accept-ranges"})

OpenStream = Callable[[Any, Callable[[Any], bytes], str], ByteStream]


async def starlette_answer(result: Any, open_stream: OpenStream, method: str) -> HttpAnswer | None:
    """Make the answer of a response of Starlette's; None if it is none.

    Raises:
        OSError: the file of a ``FileResponse`` cannot be read.

    Cancellation: while a file is looked for.
    """
    module: Any = sys.modules.get("starlette.responses")
    if module is None or not isinstance(result, module.Response):
        return None
    if isinstance(result, module.FileResponse):
        result.set_stat_headers(await trio.Path(result.path).stat())
        body: bytes | ByteStream = open_stream(_pieces(Path(result.path)), bytes, method)
    elif isinstance(result, module.StreamingResponse):
        body = open_stream(result.body_iterator, _encoder(result.charset), method)
    else:
        body = bytes(result.body)
    after: tuple[Callback, ...] = () if result.background is None else (result.background,)
    return HttpAnswer(result.status_code, _headers(result, is_whole=isinstance(body, bytes)), body, after)


def starlette_error(error: BaseException) -> HTTPError | None:
    """Make ours of an ``HTTPException`` of Starlette's; None if it is none."""
    module: Any = sys.modules.get("starlette.exceptions")
    if module is None or not isinstance(error, module.HTTPException):
        return None
    known: Any = error
    made = HTTPError(known.status_code, str(known.detail), getattr(known, "headers", None))
    return made.with_traceback(error.__traceback__)


def _headers(response: Any, *, is_whole: bool) -> Headers:
    # Whoever writes a whole body says how long it is.
    dropped = _NOT_SENT | {"content-length"} if is_whole else _NOT_SENT
    pairs = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in response.raw_headers)
    return tuple((name, value) for name, value in pairs if name not in dropped)


def _pieces(file: Path) -> Iterator[bytes]:
    with open_regular(file) as opened:
        while piece := opened.read(_CHUNK):
            yield piece


def _encoder(charset: str) -> Callable[[Any], bytes]:
    return lambda piece: piece.encode(charset) if isinstance(piece, str) else bytes(piece)


# ----------------------------------------------------------------------
# What a handler's method returned, as an answer
# ----------------------------------------------------------------------

_BYTES: Final = "application/octet-stream"
_TEXT: Final = "text/plain; charset=utf-8"
_JSON: Final = "application/json"
_LINES: Final = "application/x-ndjson"


class ResultBorder(Protocol):
    """The handler that a result comes from, as far as making an answer needs it."""

    def stream(self, values: Any, convert: Callable[[Any], bytes], step: str) -> ByteStream:
        """Run an iterator of the user's where it belongs, a bounded number of values ahead."""
        ...

    def failure(self, error: BaseException, step: str) -> Exception:
        """Log what user code is to blame for, and make of it what is raised instead."""
        ...


async def to_answer(result: Any, handler: ResultBorder, method: str) -> HttpAnswer:
    """Make the answer of what a method returned.

    Args:
        result: the method's.
        handler: whose method it is.
        method: its name, for the log.

    Raises:
        UserCodeError: the result cannot be sent, or its generator raised before its first value; it has been logged.
        HTTPError: its generator raised this before its first value.

    Ownership: a stream in the answer is the caller's to close.

    Cancellation: while a generator makes its first value; it is closed then.
    """
    if isinstance(result, tuple) and len(result) == 2 and callable(result[1]):  # noqa: PLR2004 - result and callback
        return (await to_answer(result[0], handler, method)).followed_by(result[1])
    if isinstance(result, Iterator | AsyncIterator):
        return await _streamed(result, handler, method)
    try:
        return await starlette_answer(result, handler.stream, method) or _plain(result, handler, method)
    except (TypeError, ValueError, RecursionError, OSError) as error:
        raise handler.failure(error, method) from None


def _plain(result: Any, handler: ResultBorder, method: str) -> HttpAnswer:
    if isinstance(result, bytes | bytearray | memoryview):
        return _of_type(_BYTES, bytes(result))
    if isinstance(result, str):
        return _of_type(_TEXT, result.encode())
    if isinstance(result, Response):
        return _response(result, handler, method)
    return _of_type(_JSON, _encode_json(result))


def _response(response: Response, handler: ResultBorder, method: str) -> HttpAnswer:
    after = () if response.background is None else (response.background,)
    body: bytes | ByteStream = response.body
    if isinstance(response, StreamingResponse):
        chunks = response.chunks
        values = aiter(chunks) if isinstance(chunks, AsyncIterable) else iter(chunks)
        body = handler.stream(values, _encode, method)
    return HttpAnswer(response.status_code, response.header_pairs(), body, after)


def _of_type(kind: str, body: bytes | ByteStream) -> HttpAnswer:
    return HttpAnswer(200, (("content-type", kind),), body)


def _encode_json(value: Any) -> bytes:
    return _JSON_ENCODER.encode(value).encode()


def _listed(value: Any) -> Any:
    """Give what JSON has for arrays and their scalars."""
    try:
        return value.tolist()
    except AttributeError:
        raise TypeError(f"an object of type {type(value).__name__!r} cannot be written as JSON") from None


_JSON_ENCODER: Final = json.JSONEncoder(default=_listed)


# Streams


async def _streamed(values: Any, handler: ResultBorder, method: str) -> HttpAnswer:
    chunks = _Chunks()
    stream = handler.stream(values, chunks.encode, method)
    try:
        first = await anext(stream)
    except StopAsyncIteration:
        return _of_type(_BYTES, b"")
    except BaseException:
        await stream.aclose()
        raise
    return _of_type(chunks.kind, _Begun(first, stream))


def _encode(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    return _encode_json(value) + b"\n"


class _Chunks:
    """Encodes what a generator yields; ``kind`` is the content type that its first value asks for."""

    def __init__(self) -> None:
        self.kind = ""

    def encode(self, value: Any) -> bytes:
        """Encode one value; in the thread that made it."""
        if not self.kind:
            is_bytes = isinstance(value, bytes | bytearray | memoryview)
            self.kind = _TEXT if isinstance(value, str) else _BYTES if is_bytes else _LINES
        return _encode(value)


class _Begun:
    """A stream whose first piece has been taken."""

    def __init__(self, first: bytes, rest: ByteStream) -> None:
        self._first: bytes | None = first
        self._rest = rest

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        first, self._first = self._first, None
        return await anext(self._rest) if first is None else first

    async def aclose(self) -> None:
        """Stop the stream.

        Cancellation: as the stream's.
        """
        await self._rest.aclose()
