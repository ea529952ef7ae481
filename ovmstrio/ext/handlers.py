"""What handlers may import: answers with a status or headers of their own."""

from ovmstrio.handlers.http_results import (
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
