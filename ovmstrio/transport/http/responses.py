"""Answers of the server's own paths, and the head of every answer, whichever way the request came."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from math import ceil
from typing import TYPE_CHECKING, Any, Final

import orjson

from ovmstrio.core.errors import (
    Overloaded,
    PayloadTooLarge,
    RequestTooSlow,
    ServerError,
)
from ovmstrio.core.http import HttpAnswer
from ovmstrio.transport.statuses import challenge_of, status_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ovmstrio.core.http import Headers

__all__ = [
    "JSON",
    "JSON_TYPE",
    "Cors",
    "answer_head",
    "challenge",
    "error_answer",
    "has_bare_line_feed",
    "json_answer",
    "plain_answer",
    "retry_after",
    "size_refusal",
    "slowness_refusal",
]


@dataclass(frozen=True, slots=True)
class Cors:
    """What browsers of other origins may do; ``origins`` are separated by commas, or ``*``."""

    origins: str
    methods: str = "*"
    headers: str = "*"
    credentials: bool = False

    def response_headers(self, origin: str) -> Headers:
        """Give the headers that go with an answer to a page of this origin, which may be empty.

        Browsers take one origin or ``*``, so of several the one that asks is named.
        """
        is_any = self.origins == "*"
        vary: Headers = () if is_any else (("vary", "Origin"),)
        if not is_any and origin not in {each.strip() for each in self.origins.split(",")}:
            return vary
        credentials: Headers = (("access-control-allow-credentials", "true"),) if self.credentials else ()
        return (
            *vary,
            ("access-control-allow-origin", "*" if is_any else origin),
            ("access-control-allow-methods", self.methods),
            ("access-control-allow-headers", self.headers),
            *credentials,
        )


JSON: Final = "application/json"
JSON_TYPE: Final[Headers] = (("content-type", JSON),)

_MAX_TEXT: Final = 4096
"""Characters of an error that are told: it may quote what the caller sent."""
_FAILURE: Final = "internal error; the server's log has the details"
_MOST_PLAIN_BYTES: Final = 2**16
"""Of a body that is copied behind its head."""
_MOST_PLAIN_HEADERS: Final = 2
_BLANKS: Final = " \t"
_OK: Final = 200
_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}


def json_answer(value: Any, status: int = 200) -> HttpAnswer:
    """Answer with JSON."""
    try:
        body = orjson.dumps(value)
    except orjson.JSONEncodeError:
        # A text that is not UTF-8, such as a file name in a reason; the standard library escapes what is not.
        body = json.dumps(value).encode()
    return HttpAnswer(status, JSON_TYPE, body)


def error_answer(error: Exception) -> HttpAnswer:
    """Answer with an error: ``{"error": text}`` and the status of its class.

    Of an error that nobody foresaw nothing is told; what it was is in the log.
    """
    if not isinstance(error, ServerError):
        return json_answer({"error": _FAILURE}, 500)
    text = error.message
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT]}..."
    answer = json_answer({"error": text}, status_of(error).http)
    return answer.with_headers(retry_after(error))


def retry_after(error: ServerError) -> Headers:
    """Give the header that says when to come again; none for what is no overload."""
    if not isinstance(error, Overloaded):
        return ()
    return (("retry-after", str(max(1, ceil(error.retry_after_seconds)))),)


def challenge(answer: HttpAnswer, error: ServerError) -> HttpAnswer:
    """Give the refusal of a caller with what it would have to show (RFC 6750); any other refusal as it is."""
    wanted = challenge_of(error)
    return answer.with_headers((("www-authenticate", wanted),)) if wanted else answer


def slowness_refusal(seconds: float) -> RequestTooSlow:
    """Make the refusal of a request that has not come in time."""
    return RequestTooSlow(f"the request did not come within {seconds:g} s (--request_receive_seconds)")


def has_bare_line_feed(head: bytes | bytearray) -> bool:
    """Tell whether a line of a head ends with LF alone, which others on its way may read differently."""
    return head.count(b"\n") != head.count(b"\r\n")


def size_refusal(size: int | str, limit: int) -> PayloadTooLarge:
    """Make the refusal of a body that is too large."""
    return PayloadTooLarge(f"the body has {size} bytes, the limit is {limit} (--max_message_size)")


def answer_head(
    status: int, headers: Iterable[tuple[str, str]], *, length: int | None, is_chunked: bool, keep_alive: bool
) -> bytes:
    """Write the head of an answer, blank line included.

    Args:
        status: of the answer.
        headers: besides those of the connection and of the body's length.
        length: of the body; None if it is not said.
        is_chunked: whether the body comes in chunks.
        keep_alive: whether the connection goes on.
    """
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


def plain_answer(answer: HttpAnswer) -> bytes | None:
    """Write a small answer in JSON, with one header more at the most, head and body, as one that others follow.

    None for any other.
    """
    body, headers = answer.body, answer.headers
    if answer.status != _OK or not headers or headers[0] is not JSON_TYPE[0] or len(headers) > _MOST_PLAIN_HEADERS:
        return None
    if type(body) is not bytes or len(body) > _MOST_PLAIN_BYTES:
        return None
    return _plain_head(int(time.time()), headers, len(body)) + body


@lru_cache(maxsize=64)
def _plain_head(_second: int, headers: Headers, length: int) -> bytes:
    return answer_head(_OK, headers, length=length, is_chunked=False, keep_alive=True)


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return f"date: {formatdate(second, usegmt=True)}"
