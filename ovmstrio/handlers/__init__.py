"""Nucleus ``Handler`` classes over HTTP and gRPC: loading, calls, projects and worker processes."""

from ovmstrio.util.deprecation import forward_names

# Names of the last release, which user code now imports from ``ovmstrio.ext.handlers``.
__getattr__ = forward_names(
    __name__,
    "ovmstrio.ext.handlers",
    ["HTMLResponse", "HTTPError", "JSONResponse", "PlainTextResponse", "Response", "StreamingResponse"],
)
