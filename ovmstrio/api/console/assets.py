"""The files of the page, which come with the package; nothing of it is of another host."""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from ovmstrio.core.errors import NotFound
from ovmstrio.core.http import HttpAnswer

if TYPE_CHECKING:
    from ovmstrio.core.http import Headers, HttpRequest

__all__ = ["INDEX", "asset_answer", "asset_names", "security_headers"]

INDEX: Final = "index.html"
_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}

security_headers: Final[Headers] = (
    (
        "content-security-policy",
        (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; media-src blob:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
            "require-trusted-types-for 'script'"
        ),
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
)


@cache
def asset_names() -> frozenset[str]:
    """Give the names of all files of the page."""
    return frozenset(each.name for each in files("ovmstrio.api.console").joinpath("page").iterdir() if each.is_file())


@cache
def _packed(name: str) -> tuple[bytes, bytes, str]:
    """Give a file, the same compressed, and its mark."""
    content = files("ovmstrio.api.console").joinpath("page", name).read_bytes()
    return content, gzip.compress(content, 9, mtime=0), f'"{hashlib.sha256(content).hexdigest()[:20]}"'


def asset_answer(name: str, request: HttpRequest) -> HttpAnswer:
    """Answer with a file of the page.

    Raises:
        NotFound: there is no such file.
    """
    if name not in asset_names():
        raise NotFound(f"the console has no {name[:80]!r}")
    content, packed, mark = _packed(name)
    kind = _TYPES.get(name.rpartition(".")[2], "application/octet-stream")
    headers = (
        ("content-type", kind),
        ("cache-control", "no-cache"),
        ("etag", mark),
        ("vary", "accept-encoding"),
        *security_headers,
    )
    if request.header("if-none-match") == mark:
        return HttpAnswer(304, headers)
    if "gzip" in (request.header("accept-encoding") or ""):
        return HttpAnswer(200, (*headers, ("content-encoding", "gzip")), packed)
    return HttpAnswer(200, headers, content)
