"""What pages of other origins may do with a handler: everything, but not with their users' credentials."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ovmstrio.core.http import Headers

__all__ = ["PREFLIGHT", "with_cors"]

_CORS: Final[Headers] = (
    ("access-control-allow-origin", "*"),
    ("access-control-allow-methods", "POST, GET, PUT, PATCH, DELETE, OPTIONS"),
    ("access-control-allow-headers", "*"),
    ("access-control-expose-headers", "Content-Length,Content-Range"),
)
_NAMES: Final = frozenset(name for name, _ in _CORS)

PREFLIGHT: Final[Headers] = (
    *_CORS,
    ("access-control-max-age", "1728000"),
    ("content-type", "text/plain; charset=utf-8"),
)
"""The headers of the answer to ``OPTIONS``."""


def with_cors(headers: Headers) -> Headers:
    """Give headers with those of CORS added; a handler that sets any of them has the say over that one."""
    given = {name for name, _ in headers}
    if _NAMES.isdisjoint(given):
        return (*headers, *_CORS)
    return (*headers, *((name, value) for name, value in _CORS if name not in given))
