"""Starlette responses as results of handlers, without importing Starlette."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import trio

from ovmstrio.core.http_messages import AfterResponse, ByteStream, Headers, HttpAnswer
from ovmstrio.handlers.http_responses import HTTPError
from ovmstrio.util.regular_files import open_regular

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
    return lambda piece: piece.encode(charset) if isinstance(piece, str) else bytes(piece)
