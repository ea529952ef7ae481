"""Nucleus projects: Handler classes behind HTTP verbs or the user's own gRPC service.

What handlers themselves may import from here are answers with a status or headers of their own::

    from ovmstrio.runtimes.handlers import HTTPError, JSONResponse
"""

from ovmstrio.runtimes.handlers.http.responses import (
    HTMLResponse,
    HTTPError,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)

__all__ = ["HTMLResponse", "HTTPError", "JSONResponse", "PlainTextResponse", "Response", "StreamingResponse"]
