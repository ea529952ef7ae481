"""Responses that handlers return or raise: the server's classes, and Starlette's if a handler uses them."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, Final

import trio

from ovmstrio.core.http_messages import AfterResponse, ByteStream, Headers, HttpAnswer
from ovmstrio.util.regular_files import open_regular

# ----------------------------------------------------------------------
# The server's classes
# ----------------------------------------------------------------------


class HTTPError(Exception):
    """Error raised by handlers to end a request with a status.

    Args:
        status_code: HTTP status.
        detail: response body, as text or an object that is sent as ``str(detail)``; the standard phrase of the status
            by default.
        headers: additional headers.
    """

    def __init__(self, status_code: int, detail: Any = None, headers: Mapping[str, Any] | None = None) -> None:
        self.status_code = status_code
        self.detail = _phrase(status_code) if detail is None else str(detail)
        self.headers = {name: str(value) for name, value in (headers or {}).items()}
        super().__init__(status_code, self.detail)

    def __str__(self) -> str:
        return f"{self.status_code}: {self.detail}"


class Response:
    """Response with a status and headers chosen by the handler.

    Args:
        content: body, as text or bytes.
        status_code: HTTP status.
        headers: additional headers.
        media_type: content type; that of the class by default.
        background: called after the response is sent.
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
        """Encode the content as body; raise TypeError if the content is neither text nor bytes."""
        if content is None:
            return b""
        if isinstance(content, str):
            return content.encode()
        if isinstance(content, bytes | bytearray | memoryview):
            return bytes(content)
        raise TypeError(f"the content of a {type(self).__name__} is text or bytes, got {type(content).__name__}")

    def header_pairs(self) -> Headers:
        """Return the headers, without content-length, which the server sets."""
        return tuple((name, str(value)) for name, value in self.headers.items() if name != "content-length")


class PlainTextResponse(Response):
    """Plain-text response."""

    media_type = "text/plain"


class HTMLResponse(Response):
    """HTML response."""

    media_type = "text/html"


class JSONResponse(Response):
    """JSON response with content that ``json.dumps`` accepts."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode the content as JSON; raise TypeError or ValueError if it is not serializable."""
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


class StreamingResponse(Response):
    """Response whose body is text, bytes, or an iterable of them, asynchronous or not; see :class:`Response`."""

    def __init__(
        self,
        content: Iterable[Any] | AsyncIterable[Any],
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str | None = None,
        background: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__(None, status_code, headers, media_type, background)
        # The elements of bytes are numbers.
        self.chunks = [content] if isinstance(content, str | bytes | bytearray | memoryview) else content

    def header_pairs(self) -> Headers:
        """Return the headers; a content-length that the handler set is kept."""
        return tuple((name, str(value)) for name, value in self.headers.items())


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def _with_charset(media_type: str) -> str:
    is_text = media_type.startswith("text/") and "charset=" not in media_type.lower()
    return f"{media_type}; charset=utf-8" if is_text else media_type


# ----------------------------------------------------------------------
# Starlette's classes, without an import of Starlette
# ----------------------------------------------------------------------

_CHUNK: Final = 64 * 1024


# Range requests are not supported.
_DROPPED_HEADERS: Final = frozenset({"accept-ranges"})


OpenStream = Callable[[Any, Callable[[Any], bytes], str], ByteStream]


async def convert_starlette_response(result: Any, open_stream: OpenStream, method: str) -> HttpAnswer | None:
    """Convert a Starlette response; return None for other objects. OSError if its file cannot be read."""
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
    after: tuple[AfterResponse, ...] = () if result.background is None else (result.background,)
    return HttpAnswer(result.status_code, _headers(result, is_buffered=isinstance(body, bytes)), body, after)


def convert_starlette_error(error: BaseException) -> HTTPError | None:
    """Convert a Starlette ``HTTPException``; return None for other errors."""
    module: Any = sys.modules.get("starlette.exceptions")
    if module is None or not isinstance(error, module.HTTPException):
        return None
    known: Any = error
    made = HTTPError(known.status_code, str(known.detail), getattr(known, "headers", None))
    return made.with_traceback(error.__traceback__)


def _headers(response: Any, *, is_buffered: bool) -> Headers:
    # The server sets content-length of a buffered body.
    dropped = _DROPPED_HEADERS | {"content-length"} if is_buffered else _DROPPED_HEADERS
    pairs = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in response.raw_headers)
    return tuple((name, value) for name, value in pairs if name not in dropped)


def _pieces(file: Path) -> Iterator[bytes]:
    with open_regular(file) as opened:
        while piece := opened.read(_CHUNK):
            yield piece


def _encoder(charset: str) -> Callable[[Any], bytes]:
    # bytes(3) would be three zeros.
    return lambda piece: piece.encode(charset) if isinstance(piece, str) else bytes(memoryview(piece))
