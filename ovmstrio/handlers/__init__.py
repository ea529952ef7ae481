"""Nucleus ``Handler`` classes over HTTP and gRPC: loading, calls, projects and worker processes."""

from ovmstrio.util.deprecation import forward_names

# Deprecated names: user code now imports them from ``ovmstrio.ext.handlers``.
__getattr__ = forward_names(
    __name__,
    "ovmstrio.ext.handlers",
    ["HTMLResponse", "HTTPError", "JSONResponse", "PlainTextResponse", "Response", "StreamingResponse"],
)
