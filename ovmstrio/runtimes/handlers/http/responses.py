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
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, ClassVar

from ovmstrio.core.http import Headers

__all__ = ["HTMLResponse", "HTTPError", "JSONResponse", "PlainTextResponse", "Response", "StreamingResponse"]


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
