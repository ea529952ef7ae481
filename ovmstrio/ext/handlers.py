"""Handler API: HTTP responses with status and headers."""

from ovmstrio.handlers.http_responses import (
    HTMLResponse,
    HTTPError,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)

__all__ = [
    "HTMLResponse",
    "HTTPError",
    "JSONResponse",
    "PlainTextResponse",
    "Response",
    "StreamingResponse",
]
