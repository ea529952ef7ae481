"""Heads of plain HTTP/1.1 requests."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

METHODS: Final = ("POST", "GET", "PUT", "PATCH", "DELETE")


_HEAD: Final = re.compile(
    rb"(%b) (/[^#\x00-\x20\x7f-\xff]*) HTTP/1\.1\r\n"
    rb"((?:[!#$%%&'*+\-.^_`|~0-9A-Za-z]+:[^\r\n\x00\x0b\x0c\x7f]*\r\n)+)\r\n" % "|".join(METHODS).encode()
)
"""Accepts a subset of what the application's parser accepts."""


_LENGTH: Final = re.compile(r"[0-9]{1,15}")


_UNUSUAL: Final = frozenset({"transfer-encoding", "content-encoding", "expect", "upgrade", "trailer", "te"})


_UNREPEATABLE: Final = frozenset(
    {"host", "content-length", "connection", "content-type", "inference-header-content-length"}
)


_BODILESS_METHODS: Final = frozenset({"GET", "DELETE"})
"""Methods whose requests may omit content-length, because they usually have no body."""


class RequestHead(NamedTuple):
    """Request without its body; header names are in lower case, ``target`` is as sent."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body_length: int
    keep_alive: bool


def parse_head(head: bytes) -> RequestHead | None:
    """Parse a request head, including its blank line; None if it is not plain."""
    match = _HEAD.fullmatch(head)
    if match is None:
        return None
    lines = (line.partition(":") for line in match[3].decode("latin-1").split("\r\n")[:-1])
    headers = tuple((name.lower(), value.strip(" \t")) for name, _, value in lines)
    found = dict(headers)
    if not _UNUSUAL.isdisjoint(found) or "host" not in found:
        return None
    if len(found) < len(headers) and any(name in _UNREPEATABLE for name in _repeated(headers)):
        return None
    method, target = match[1].decode(), match[2].decode("latin-1")
    length = found.get("content-length", "0" if method in _BODILESS_METHODS else "")
    connection = found.get("connection", "keep-alive").lower()
    if not _LENGTH.fullmatch(length) or connection not in {"keep-alive", "close"}:
        return None
    return RequestHead(method, target, headers, int(length), connection == "keep-alive")


def _repeated(headers: tuple[tuple[str, str], ...]) -> set[str]:
    names = [name for name, _ in headers]
    return {name for name in names if names.count(name) > 1}
