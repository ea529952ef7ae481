"""Responses that handlers return or raise, without dependencies."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, ClassVar

from ovmstrio.core.http_messages import Headers


class HTTPError(Exception):
    """Error raised by handlers to end a request with a status.

    Args:
        status_code: HTTP status.
        detail: response body; the standard phrase of the status by default.
        headers: additional headers.
    """

    def __init__(self, status_code: int, detail: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        self.status_code = status_code
        self.detail = _phrase(status_code) if detail is None else detail
        self.headers = dict(headers or {})
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
        return tuple((name, value) for name, value in self.headers.items() if name != "content-length")


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
    """Response whose body is an iterable of text or bytes, asynchronous or not; see :class:`Response`."""

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
        """Return the headers; a content-length that the handler set is kept."""
        return tuple(self.headers.items())


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def _with_charset(media_type: str) -> str:
    is_text = media_type.startswith("text/") and "charset=" not in media_type.lower()
    return f"{media_type}; charset=utf-8" if is_text else media_type
