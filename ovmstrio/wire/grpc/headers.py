"""Header blocks read: HPACK, the rules of HTTP/2 for requests, and what gRPC's headers mean.

A block that refers to the dynamic table only, or brings literals that are not indexed, decodes to the same request
as long as the table stays the same. Clients send such blocks for every call after their first, so decoded requests
are kept by their block until the table changes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Final

from grpclib.const import Status
from grpclib.metadata import decode_timeout
from hpack import Decoder
from hpack.exceptions import HPACKError

from ovmstrio.wire.grpc.frames import ConnectionFault, ErrorCode
from ovmstrio.wire.grpc.replies import http_refusal_block, trailers_only_block

__all__ = ["HeaderDecoder", "HeaderList", "MalformedRequest", "RequestHead", "read_request_head", "read_trailers"]

HeaderList = tuple[tuple[bytes, bytes], ...]

_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_BAD_VALUE: Final = re.compile(rb"[\x00\r\n]").search
_PSEUDO: Final = frozenset({b":method", b":scheme", b":path", b":authority"})
_CONNECTION_HEADERS: Final = frozenset(
    {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}
)
_CACHED_HEADS: Final = 64
_CACHED_BLOCK_BYTES: Final = 1_024
_TABLE_ENTRY_OVERHEAD: Final = 32
_LONGEST_TIMEOUT: Final = 9  # eight digits and a unit
_HARD_LIMIT_FACTOR: Final = 4
_HARD_LIMIT_EXTRA_BYTES: Final = 16 * 1_024
"""How much larger a list may be that is still read, to be refused by its name: reading costs some µs a field."""
_MANY_TABLE_UPDATES: Final = re.compile(rb"(?:[\x20-\x3e]|\x3f[\x80-\xff]*[\x00-\x7f]){3}").match
"""More changes of the table's size than a block may begin with (RFC 7541, section 4.2)."""


class MalformedRequest(ValueError):
    """A header list that RFC 9113 calls malformed; its stream is reset, the connection lives on."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestHead:
    """One request's headers, understood. Shared by all calls that sent the same block.

    Attributes:
        path: the ``:path``, which names service and method.
        timeout_seconds: from ``grpc-timeout``; infinite when there is none.
        encoding: from ``grpc-encoding``.
        content_length: from ``content-length``; ``None`` when absent.
        headers: everything as it came, decoded as Latin-1.
        refusal: the header block that answers a request which cannot become a call, else ``None``.
        traceparent: W3C's header of that name; empty when absent.
        notes: what others have found out from the headers and need not find out again, by who they are.
    """

    path: str
    timeout_seconds: float
    encoding: str
    content_length: int | None
    headers: tuple[tuple[str, str], ...]
    refusal: bytes | None
    traceparent: str = ""
    notes: dict[object, Any] = field(init=False, repr=False, default_factory=dict)


class HeaderDecoder:
    """HPACK decoding for one connection, with a cache of the requests it has seen.

    Raises:
        ConnectionFault: from every method, when the block cannot be decoded: the table is out of step for good.
    """

    __slots__ = ("_cache", "_hpack", "_limit", "_table_changed")

    def __init__(self, max_header_list_bytes: int) -> None:
        self._limit = max_header_list_bytes
        self._hpack: Decoder | None = None
        self._table_changed = False
        self._cache: dict[bytes, RequestHead | MalformedRequest] = {}

    def request(self, block: bytes) -> RequestHead | MalformedRequest:
        """Decode the header block that opens a stream; a malformed one is returned, not raised."""
        head = self._cache.get(block)
        return self._decode_request(block) if head is None else head

    def header_list(self, block: bytes) -> HeaderList:
        """Decode any header block, which keeps the table in step."""
        if self._hpack is None:
            self._hpack = Decoder(min(self._limit * _HARD_LIMIT_FACTOR, self._limit + _HARD_LIMIT_EXTRA_BYTES))
        if _MANY_TABLE_UPDATES(block):
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, "a header block changes the table's size three times")
        before = self._table_mark(self._hpack)
        try:
            headers = tuple(self._hpack.decode(block, raw=True))
        except (HPACKError, UnicodeError) as error:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, str(error)) from error
        newest, *sizes = self._table_mark(self._hpack)
        self._table_changed = newest is not before[0] or sizes != before[1:]
        if self._table_changed:
            self._cache.clear()
        return headers

    def _decode_request(self, block: bytes) -> RequestHead | MalformedRequest:
        headers = self.header_list(block)
        head: RequestHead | MalformedRequest
        try:
            head = read_request_head(headers, self._limit)
        except MalformedRequest as error:
            head = error
        is_refused = isinstance(head, RequestHead) and head.refusal is not None
        # A short block may decode to a long list, which is refused.
        if not self._table_changed and len(block) <= _CACHED_BLOCK_BYTES and not is_refused:
            if len(self._cache) >= _CACHED_HEADS:
                self._cache.clear()
            self._cache[block] = head
        return head

    @staticmethod
    def _table_mark(decoder: Decoder) -> list[object]:
        """Make what differs after a change: an added entry is a new object even where it equals an old one."""
        table = decoder.header_table
        entries = table.dynamic_entries
        return [entries[0] if entries else None, len(entries), table.maxsize]


def read_request_head(headers: HeaderList, max_bytes: int) -> RequestHead:
    """Check a request's header list and read what gRPC says in it.

    Raises:
        MalformedRequest: the list breaks RFC 9113, section 8.
    """
    pseudo, fields = _split(headers)
    if b":method" not in pseudo or b":scheme" not in pseudo or not pseudo.get(b":path"):
        raise MalformedRequest(":method, :scheme and :path are required")
    values = dict(fields)
    refusal = _refusal(headers, pseudo, values, max_bytes)
    timeout = math.inf
    if b"grpc-timeout" in values:
        try:
            timeout = _timeout_seconds(values[b"grpc-timeout"])
        except ValueError as error:
            refusal = refusal or trailers_only_block(Status.INVALID_ARGUMENT, str(error))
    return RequestHead(
        path=pseudo[b":path"].decode("latin-1"),
        timeout_seconds=timeout,
        encoding=values.get(b"grpc-encoding", b"identity").decode("latin-1"),
        content_length=_content_length(values.get(b"content-length")),
        headers=tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers),
        refusal=refusal,
        traceparent=values.get(b"traceparent", b"").decode("latin-1"),
    )


def read_trailers(headers: HeaderList) -> None:
    """Check the trailers of a request; gRPC gives them no meaning.

    Raises:
        MalformedRequest: they hold pseudo-headers or names that HTTP/2 forbids.
    """
    pseudo, _ = _split(headers)
    if pseudo:
        raise MalformedRequest("trailers hold pseudo-headers")


def _split(headers: HeaderList) -> tuple[dict[bytes, bytes], list[tuple[bytes, bytes]]]:
    pseudo: dict[bytes, bytes] = {}
    fields: list[tuple[bytes, bytes]] = []
    for name, value in headers:
        if name[:1] == b":":
            if fields or name in pseudo or name not in _PSEUDO:
                raise MalformedRequest(f"pseudo-header {name!r} is unknown, repeated or late")
            pseudo[name] = value
            continue
        if not _NAME(name) or name in _CONNECTION_HEADERS or (name == b"te" and value != b"trailers"):
            raise MalformedRequest(f"header {name!r} is not allowed in HTTP/2")
        fields.append((name, value))
        if _BAD_VALUE(value):
            raise MalformedRequest(f"header {name!r} has control characters in its value")
    return pseudo, fields


def _refusal(
    headers: HeaderList, pseudo: dict[bytes, bytes], values: dict[bytes, bytes], max_bytes: int
) -> bytes | None:
    if pseudo[b":method"] != b"POST":
        return http_refusal_block(405, (b"allow", b"POST"))
    content_type = values.get(b"content-type", b"").partition(b";")[0].strip()
    if content_type != b"application/grpc" and not content_type.startswith(b"application/grpc+"):
        return http_refusal_block(415)
    size = sum(len(name) + len(value) + _TABLE_ENTRY_OVERHEAD for name, value in headers)
    if size > max_bytes:
        text = f"request headers of {size} bytes are larger than the limit of {max_bytes} bytes (max_header_list_bytes)"
        return trailers_only_block(Status.RESOURCE_EXHAUSTED, text)
    return None


def _timeout_seconds(value: bytes) -> float:
    if len(value) > _LONGEST_TIMEOUT:
        raise ValueError(f"grpc-timeout: expected at most eight digits and a unit, got {len(value)} characters")
    try:
        return decode_timeout(value.decode("ascii"))
    except ValueError as error:
        raise ValueError(f"grpc-timeout: expected digits and one of HMSmun, got {value!r}") from error


def _content_length(value: bytes | None) -> int | None:
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:  # noqa: PLR2004  # what fits 63 bits
        raise MalformedRequest(f"content-length is not a number: {value!r}")
    return int(value)
