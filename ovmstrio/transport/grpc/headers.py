"""HTTP/2 header blocks of gRPC: encoding, HPACK decoding, request checks, errors with trailers.

Clients send the same block for every call after the first. Such a block decodes to the same request as long as the
HPACK dynamic table does not change, so decoded requests are cached by their block.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil
from typing import Any, Final

from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.metadata import decode_timeout, encode_bin_value, encode_grpc_message
from hpack import Decoder
from hpack.exceptions import HPACKError
from hpack.table import HeaderTable

from ovmstrio.transport.grpc.frames import ConnectionFault, ErrorCode

# -- Errors of calls ---------------------------------------------------------------------------------------------------

ErrorMapper = Callable[[Exception], GRPCError | None]


def single_error(error: Exception) -> Exception:
    """Unwrap exception groups with one exception, as nurseries raise them."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


class ErrorWithTrailers(GRPCError):
    """gRPC error with additional trailers (name, value)."""

    def __init__(self, status: Status, message: str, *pairs: tuple[str, str]) -> None:
        super().__init__(status, message)
        self._pairs = pairs

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Names and values of the trailers."""
        return self._pairs

    def trailers(self) -> bytes:
        """Encode the additional trailers."""
        return metadata_block(self._pairs)


class RetryableError(ErrorWithTrailers):
    """Transient gRPC error with ``grpc-retry-pushback-ms`` and ``retry-after`` trailers."""

    def __init__(self, status: Status, message: str, seconds: float) -> None:
        pushback = ("grpc-retry-pushback-ms", str(round(seconds * 1000)))
        super().__init__(status, message, pushback, ("retry-after", str(ceil(seconds))))
        self.seconds = seconds


# -- Encoding ----------------------------------------------------------------------------------------------------------

TABLE_SIZE_ZERO: Final = b"\x20"
"""HPACK dynamic table size update to 0."""

_STATUS_200 = b"\x88"
_STATUS_NAME = b"\x08"
_CONTENT_TYPE_NAME = b"\x0f\x10"
_MAX_STRING_PREFIX = 127
# C-core rejects metadata above 8 KiB, and its caller would lose the status with the message.
_MAX_MESSAGE_CHARACTERS: Final = 4_096


def _string(value: bytes) -> bytes:
    length = len(value)
    if length < _MAX_STRING_PREFIX:
        return bytes((length,)) + value
    prefix = [_MAX_STRING_PREFIX]
    length -= _MAX_STRING_PREFIX
    while length >= 128:  # noqa: PLR2004  # seven bits per byte
        prefix.append(length & 127 | 128)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + value


def encode_header(name: bytes, value: bytes) -> bytes:
    """Encode a header without the dynamic table, so that the bytes can be reused."""
    return b"\x00" + _string(name) + _string(value)


def metadata_block(pairs: Iterable[tuple[str, str]]) -> bytes:
    """Encode metadata checked by ``grpclib.metadata.encode_metadata``."""
    return b"".join(encode_header(name.encode("ascii"), value.encode("ascii")) for name, value in pairs)


def trailers_block(status: Status, message: str | None, details: bytes | None = None) -> bytes:
    """Encode ``grpc-status``, the percent-encoded ``grpc-message`` and ``grpc-status-details-bin``."""
    block = encode_header(b"grpc-status", b"%d" % status.value)
    if message:
        # Percent-encoding only lengthens the text.
        prefix = message[: _MAX_MESSAGE_CHARACTERS + 1]
        text = encode_grpc_message(prefix.encode("utf-8", "replace").decode("utf-8"))
        if len(text) > _MAX_MESSAGE_CHARACTERS:
            text = text[:_MAX_MESSAGE_CHARACTERS]
            escape = text.rfind("%", _MAX_MESSAGE_CHARACTERS - 2)
            text = text if escape < 0 else text[:escape]
        block += encode_header(b"grpc-message", text.encode("ascii"))
    if details is not None:
        block += encode_header(b"grpc-status-details-bin", encode_bin_value(details))
    return block


def trailers_only_block(status: Status, message: str | None, details: bytes | None = None) -> bytes:
    """Encode the response of a call that fails before anything was sent: headers and trailers in one block."""
    return RESPONSE_HEADERS + trailers_block(status, message, details)


@lru_cache(maxsize=16)
def http_refusal_block(http_status: int, *extra: tuple[bytes, bytes]) -> bytes:
    """Encode the HTTP response to a request that is not gRPC."""
    return (
        _STATUS_NAME
        + _string(b"%d" % http_status)
        + encode_header(b"content-length", b"0")
        + b"".join(encode_header(name, value) for name, value in extra)
    )


RESPONSE_HEADERS: Final = _STATUS_200 + _CONTENT_TYPE_NAME + _string(b"application/grpc")
OK_TRAILERS: Final = trailers_block(Status.OK, None)


# -- Decoding ----------------------------------------------------------------------------------------------------------

HeaderList = tuple[tuple[bytes, bytes], ...]

_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_BAD_VALUE: Final = re.compile(rb"[\x00\r\n]").search
_PSEUDO: Final = frozenset({b":method", b":scheme", b":path", b":authority"})
_CONNECTION_HEADERS: Final = frozenset(
    {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}
)
_MAX_CACHED_HEADS: Final = 64
_MAX_CACHED_BLOCK_BYTES: Final = 1_024
_TABLE_ENTRY_OVERHEAD: Final = 32
_MAX_TIMEOUT_CHARACTERS: Final = 9  # eight digits and a unit
_HARD_LIMIT_FACTOR: Final = 4
_HARD_LIMIT_EXTRA_BYTES: Final = 16 * 1_024
"""Limits up to which an oversized header list is decoded, so that it can be refused with its size (some µs a field)."""
_has_too_many_table_updates: Final = re.compile(rb"(?:[\x20-\x3e]|\x3f[\x80-\xff]*[\x00-\x7f]){3}").match
"""Match of more table size updates than a block may begin with (RFC 7541, 4.2)."""


class MalformedRequest(ValueError):
    """Malformed header list (RFC 9113); its stream is reset, the connection continues."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestHead:
    """Parsed request headers, shared by all calls with the same header block.

    Attributes:
        path: ``:path``, the service and method.
        timeout_seconds: ``grpc-timeout``; infinite if absent.
        encoding: ``grpc-encoding``.
        content_length: ``content-length``; None if absent.
        headers: all headers as received, decoded as Latin-1.
        refusal: header block of the response to a request that cannot become a call, else None.
        traceparent: W3C ``traceparent``; empty if absent.
        notes: cache for values that users of the headers derive from them, by an arbitrary key.
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
    """HPACK decoder of one connection, with a cache of decoded requests.

    Every method raises ``ConnectionFault`` if the block cannot be decoded, because the table is then out of sync.
    """

    __slots__ = ("_cache", "_hpack", "_limit", "_lists", "_table_changed")

    def __init__(self, max_header_list_bytes: int) -> None:
        self._limit = max_header_list_bytes
        self._hpack: Decoder | None = None
        self._table_changed = False
        self._cache: dict[bytes, RequestHead | MalformedRequest] = {}
        self._lists: dict[bytes, HeaderList] = {}

    def request(self, block: bytes) -> RequestHead | MalformedRequest:
        """Decode the header block that opens a stream; a malformed request is returned, not raised."""
        head = self._cache.get(block)
        return self._decode_request(block) if head is None else head

    def response(self, block: bytes) -> HeaderList:
        """Decode a header block of a response."""
        headers = self._lists.get(block)
        if headers is not None:
            return headers
        if len(block) > _MAX_CACHED_BLOCK_BYTES:
            return self.header_list(block)
        # A request id differs in each response, so the cache would not help.
        if (headers := _plain_list(block)) is None:
            headers = self.header_list(block)
            if not self._table_changed:
                if len(self._lists) >= _MAX_CACHED_HEADS:
                    self._lists.clear()
                self._lists[block] = headers
        return headers

    def header_list(self, block: bytes) -> HeaderList:
        """Decode a header block."""
        if self._hpack is None:
            self._hpack = Decoder(min(self._limit * _HARD_LIMIT_FACTOR, self._limit + _HARD_LIMIT_EXTRA_BYTES))
        if _has_too_many_table_updates(block):
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, "header block has more than two table size updates")
        before = self._table_fingerprint(self._hpack)
        try:
            headers = tuple(self._hpack.decode(block, raw=True))
        except (HPACKError, UnicodeError) as error:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, str(error)) from error
        newest, *sizes = self._table_fingerprint(self._hpack)
        self._table_changed = newest is not before[0] or sizes != before[1:]
        if self._table_changed:
            self._cache.clear()
            self._lists.clear()
        return headers

    def _decode_request(self, block: bytes) -> RequestHead | MalformedRequest:
        headers = self.header_list(block)
        head: RequestHead | MalformedRequest
        try:
            head = parse_request_head(headers, self._limit)
        except MalformedRequest as error:
            head = error
        is_refused = isinstance(head, RequestHead) and head.refusal is not None
        # A refused request is not cached: a short block may decode to a long list.
        if not self._table_changed and len(block) <= _MAX_CACHED_BLOCK_BYTES and not is_refused:
            if len(self._cache) >= _MAX_CACHED_HEADS:
                self._cache.clear()
            self._cache[block] = head
        return head

    @staticmethod
    def _table_fingerprint(decoder: Decoder) -> list[object]:
        """Return a fingerprint of the table; an added entry is a new object even if it equals an old one."""
        table = decoder.header_table
        entries = table.dynamic_entries
        return [entries[0] if entries else None, len(entries), table.maxsize]


_STATIC_TABLE: Final = ((b"", b""), *HeaderTable.STATIC_TABLE)
_LONGEST_PREFIX: Final = 15


def _plain_list(block: bytes) -> HeaderList | None:
    """Decode a block of short literals that no later block refers to; None for any other block."""
    headers: list[tuple[bytes, bytes]] = []
    position, end = 0, len(block)
    try:
        while position < end:
            index = block[position]
            position += 1
            if index > 128:  # noqa: PLR2004 - an indexed field
                headers.append(_STATIC_TABLE[index - 128])
                continue
            if index > 31:  # noqa: PLR2004 - changes the table
                return None
            index &= _LONGEST_PREFIX
            if index == _LONGEST_PREFIX:
                index += block[position]
                position += 1
            name = _STATIC_TABLE[index][0]
            for _ in range(1 if name else 2):
                start = position + 1
                position = start + block[position]
                # A larger length has more bytes, or is that of a Huffman code.
                if block[start - 1] >= _MAX_STRING_PREFIX or position > end:
                    return None
                name, value = name or block[start:position], block[start:position]
            headers.append((name, value))
    except IndexError:
        return None
    return tuple(headers)


def parse_request_head(headers: HeaderList, max_bytes: int) -> RequestHead:
    """Check and parse a request's header list; raises ``MalformedRequest`` if it violates RFC 9113, section 8."""
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


def check_trailers(headers: HeaderList) -> None:
    """Check the trailers of a request, which have no meaning in gRPC; raises ``MalformedRequest``."""
    pseudo, _ = _split(headers)
    if pseudo:
        raise MalformedRequest("trailers contain pseudo-headers")


def _split(headers: HeaderList) -> tuple[dict[bytes, bytes], list[tuple[bytes, bytes]]]:
    pseudo: dict[bytes, bytes] = {}
    fields: list[tuple[bytes, bytes]] = []
    for name, value in headers:
        if name[:1] == b":":
            if fields or name in pseudo or name not in _PSEUDO:
                raise MalformedRequest(f"pseudo-header {name!r} is unknown, repeated or after other headers")
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
    if len(value) > _MAX_TIMEOUT_CHARACTERS:
        raise ValueError(f"grpc-timeout: expected at most eight digits and a unit, got {len(value)} characters")
    try:
        return decode_timeout(value.decode("ascii"))
    except ValueError as error:
        raise ValueError(f"grpc-timeout: expected digits and one of HMSmun, got {value!r}") from error


def _content_length(value: bytes | None) -> int | None:
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:  # noqa: PLR2004  # fits in 63 bits
        raise MalformedRequest(f"content-length is not a number: {value!r}")
    return int(value)
