"""HTTP responses of the server: JSON, errors, CORS, response heads and the deadline for a response."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import dataclass, replace
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import orjson
import trio

from ovmstrio.core.errors import (
    InvalidField,
    Overloaded,
    PayloadTooLarge,
    RequestTooSlow,
    SequenceRestored,
    ServerError,
    WorkerRestarting,
)
from ovmstrio.core.events import REQUEST_ID_HEADER, RequestId
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.core.request import RESTORED_STEPS
from ovmstrio.transport.statuses import error_status, www_authenticate_value
from ovmstrio.util.truncation import shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ovmstrio.core.http_messages import Headers, HttpRequest


@dataclass(frozen=True, slots=True)
class Cors:
    """CORS settings; ``origins`` is ``*`` or a comma-separated list."""

    origins: str
    methods: str = "*"
    headers: str = "*"
    credentials: bool = False

    def response_headers(self, request_headers: Headers) -> Headers:
        """Return the CORS headers for a request.

        Browsers accept one origin or ``*``, so with several origins the requesting one is returned. A preflight gets
        the method and headers that it requests in place of ``*``: to browsers, ``*`` does not include
        ``Authorization``, and with credentials it is a name without special meaning.
        """
        given = dict(request_headers)
        origin, is_any = given.get("origin", ""), self.origins == "*"
        vary: Headers = () if is_any else (("vary", "Origin"),)
        if not is_any and origin not in {each.strip() for each in self.origins.split(",")}:
            return vary
        credentials: Headers = (("access-control-allow-credentials", "true"),) if self.credentials else ()
        return (
            *vary,
            ("access-control-allow-origin", "*" if is_any else origin),
            ("access-control-allow-methods", _expand(self.methods, given.get("access-control-request-method"))),
            ("access-control-allow-headers", _expand(self.headers, given.get("access-control-request-headers"))),
            *credentials,
        )


def _expand(allowed: str, requested: str | None) -> str:
    return (requested if allowed == "*" else None) or allowed


JSON: Final = "application/json"
JSON_TYPE: Final[Headers] = (("content-type", JSON),)

_MAX_TEXT: Final = 4096
"""Maximum characters of an error message, which may quote the request."""
_INTERNAL_ERROR: Final = "internal error; the server's log has the details"
_MAX_PLAIN_BYTES: Final = 2**16
"""Maximum size of a body that is copied to its head."""
_MAX_PLAIN_HEADERS: Final = 2
_BLANKS: Final = " \t"
_OK: Final = 200
_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}


def json_response(value: Any, status: int = 200) -> HttpAnswer:
    """Return a JSON response."""
    try:
        body = orjson.dumps(value)
    except orjson.JSONEncodeError:
        # Text that is not valid UTF-8, such as a file name; the standard library escapes surrogates.
        body = json.dumps(value).encode()
    return HttpAnswer(status, JSON_TYPE, body)


def error_response(error: Exception) -> HttpAnswer:
    """Return ``{"error": text}`` with the status of the error's class; unexpected errors have a fixed text."""
    if not isinstance(error, ServerError):
        return json_response({"error": _INTERNAL_ERROR}, 500)
    text = error.message
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT]}..."
    answer = json_response({"error": text}, error_status(error).http)
    if isinstance(error, SequenceRestored):
        return answer.with_headers(((RESTORED_STEPS, str(error.steps)),))
    return answer.with_headers(retry_after_headers(error))


def retry_after_headers(error: ServerError) -> Headers:
    """Return the ``retry-after`` header of an overloaded server or a restarting worker; none for other errors."""
    if not isinstance(error, (Overloaded, WorkerRestarting)):
        return ()
    return (("retry-after", str(max(1, math.ceil(error.retry_after_seconds)))),)


def with_auth_challenge(answer: HttpAnswer, error: ServerError) -> HttpAnswer:
    """Add ``www-authenticate`` to the response of an authentication failure (RFC 6750)."""
    auth_challenge = www_authenticate_value(error)
    return answer.with_headers((("www-authenticate", auth_challenge),)) if auth_challenge else answer


def quality_values(header: str) -> dict[str, float]:
    """Return the weights of a list such as that of ``Accept`` by its lower-case values (RFC 9110, section 12.4.2)."""
    weights = {}
    for each in header.lower().split(","):
        value, *parameters = (part.strip() for part in each.split(";"))
        weight = next((one[2:] for one in parameters if one.startswith("q=")), "1")
        weights[value] = float(weight) if weight.replace(".", "", 1).isdecimal() else 0.0
    return weights


def accepts_gzip(request: HttpRequest) -> bool:
    """Return True if a request names gzip and does not prefer a body without compression."""
    weights = quality_values(request.header("accept-encoding") or "")
    wanted = weights.get("gzip", 0.0)
    return wanted > 0 and wanted >= weights.get("identity", 0.0)


def request_timeout_error(seconds: float) -> RequestTooSlow:
    """Return the error for a request that did not arrive in time."""
    return RequestTooSlow(f"the request did not come within {seconds:g} s (--request-read-timeout)")


_EMPTY_LINES: Final = re.compile(rb"(?:\r\n)+")


def leading_empty_lines(data: bytes | bytearray) -> int:
    """Return the size in bytes of empty lines before a request line, which a server ignores (RFC 9112, section 2.2)."""
    lines = _EMPTY_LINES.match(data)
    return lines.end() if lines else 0


def has_bare_line_feed(head: bytes | bytearray) -> bool:
    """Return whether a line ends with a bare LF, which proxies may parse differently."""
    return head.count(b"\n") != head.count(b"\r\n")


def body_too_large_error(size: int | str, limit: int) -> PayloadTooLarge:
    """Return the error for a body that is too large."""
    return PayloadTooLarge(f"the body has {size} bytes, the limit is {limit} (--max-message-size)")


def encode_response_head(
    status: int, headers: Iterable[tuple[str, str]], *, length: int | None, is_chunked: bool, keep_alive: bool
) -> bytes:
    """Encode a response head, including its blank line; ``headers`` exclude connection and body framing."""
    lines = [f"HTTP/1.1 {status} {_PHRASES.get(status, '')}", _date(int(time.time()))]
    lines += [f"{name}: {value.strip(_BLANKS)}" for name, value in headers]
    if length is not None:
        lines.append(f"content-length: {length}")
    elif is_chunked:
        lines.append("transfer-encoding: chunked")
    if not keep_alive:
        lines.append("connection: close")
    lines.append("\r\n")
    return "\r\n".join(lines).encode("latin-1")


def with_request_id(answer: HttpAnswer, request_id: RequestId) -> HttpAnswer:
    """Return a response with the id of its request, unless a service has set the header."""
    if any(name.lower() == REQUEST_ID_HEADER for name, _ in answer.headers):
        return answer
    return replace(answer, headers=(*answer.headers, (REQUEST_ID_HEADER, request_id.value)))


def encode_plain_json(answer: HttpAnswer, request_id: str = "") -> bytes | None:
    """Encode a small JSON response with at most one additional header, on a connection that stays open; else None."""
    body, headers = answer.body, answer.headers
    if answer.status != _OK or not headers or headers[0] is not JSON_TYPE[0] or len(headers) > _MAX_PLAIN_HEADERS:
        return None
    if type(body) is not bytes or len(body) > _MAX_PLAIN_BYTES:
        return None
    head = _plain_head(int(time.time()), headers, len(body))
    if request_id and (len(headers) == 1 or headers[1][0] != REQUEST_ID_HEADER):
        return b"%bx-request-id: %b\r\n\r\n%b" % (head[:-2], request_id.encode(), body)
    return head + body


@lru_cache(maxsize=64)
def _plain_head(_second: int, headers: Headers, length: int) -> bytes:
    return encode_response_head(_OK, headers, length=length, is_chunked=False, keep_alive=True)


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return f"date: {formatdate(second, usegmt=True)}"


# -- Request deadline --------------------------------------------------------------------------------------------------

_HEADER: Final = "x-request-timeout"
_MAX_SECONDS: Final = 86_400.0


def request_deadline(request: HttpRequest) -> float:
    """Return the deadline in trio time from the ``X-Request-Timeout`` header (seconds); infinite without it.

    Raises ``InvalidField`` if the header is not a positive number.
    """
    value = request.header(_HEADER)
    if value is None:
        return math.inf
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidField(
            "X-Request-Timeout: expected seconds above 0", field="X-Request-Timeout", got=shown(value, 40)
        )
    return trio.current_time() + min(seconds, _MAX_SECONDS)
