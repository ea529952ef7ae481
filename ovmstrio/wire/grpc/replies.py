"""Header blocks written: response headers, trailers and refusals as HPACK bytes.

Only literals that are not indexed and entries of the static table are used. Such a block depends on no state, so the
usual ones are made once, whatever the connection.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from grpclib.const import Status
from grpclib.metadata import encode_bin_value, encode_grpc_message

__all__ = [
    "OK_TRAILERS",
    "RESPONSE_HEADERS",
    "TABLE_SIZE_ZERO",
    "http_refusal_block",
    "metadata_block",
    "trailers_block",
    "trailers_only_block",
]

TABLE_SIZE_ZERO: Final = b"\x20"
"""The HPACK instruction by which this side says that it uses no dynamic table."""

_STATUS_200 = b"\x88"
_STATUS_NAME = b"\x08"
_CONTENT_TYPE_NAME = b"\x0f\x10"
_LONGEST_STRING_PREFIX = 127
# C-core refuses metadata above 8 KiB, and the caller would lose the status together with its text.
_LONGEST_MESSAGE_CHARACTERS: Final = 4_096


def _string(value: bytes) -> bytes:
    length = len(value)
    if length < _LONGEST_STRING_PREFIX:
        return bytes((length,)) + value
    prefix = [_LONGEST_STRING_PREFIX]
    length -= _LONGEST_STRING_PREFIX
    while length >= 128:  # noqa: PLR2004  # seven bits a byte
        prefix.append(length & 127 | 128)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + value


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + _string(name) + _string(value)


def metadata_block(pairs: Iterable[tuple[str, str]]) -> bytes:
    """Encode metadata that ``grpclib.metadata.encode_metadata`` has checked."""
    return b"".join(_literal(name.encode("ascii"), value.encode("ascii")) for name, value in pairs)


def trailers_block(status: Status, message: str | None, details: bytes | None = None) -> bytes:
    """Encode ``grpc-status``, the percent-encoded ``grpc-message`` and ``grpc-status-details-bin``."""
    block = _literal(b"grpc-status", b"%d" % status.value)
    if message:
        text = encode_grpc_message(message.encode("utf-8", "replace").decode("utf-8"))
        if len(text) > _LONGEST_MESSAGE_CHARACTERS:
            text = text[:_LONGEST_MESSAGE_CHARACTERS]
            escape = text.rfind("%", _LONGEST_MESSAGE_CHARACTERS - 2)
            text = text if escape < 0 else text[:escape]
        block += _literal(b"grpc-message", text.encode("ascii"))
    if details is not None:
        block += _literal(b"grpc-status-details-bin", encode_bin_value(details))
    return block


def trailers_only_block(status: Status, message: str | None, details: bytes | None = None) -> bytes:
    """Encode the answer of a call that fails before anything was sent: headers and trailers in one."""
    return RESPONSE_HEADERS + trailers_block(status, message, details)


@lru_cache(maxsize=16)
def http_refusal_block(http_status: int, *extra: tuple[bytes, bytes]) -> bytes:
    """Encode the bare HTTP answer to a request that is not gRPC."""
    return (
        _STATUS_NAME
        + _string(b"%d" % http_status)
        + _literal(b"content-length", b"0")
        + b"".join(_literal(name, value) for name, value in extra)
    )


RESPONSE_HEADERS: Final = _STATUS_200 + _CONTENT_TYPE_NAME + _string(b"application/grpc")
OK_TRAILERS: Final = trailers_block(Status.OK, None)
