"""The few forms of protobuf's wire format that are written by hand."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ovmstrio.core.request import Buffer

__all__ = ["delimited", "encode_varint", "write_varint"]

_CONTINUED: Final = 128


def write_varint(value: int) -> bytes:
    """Write a number of which no two are likely to be the same."""
    octets = bytearray()
    while value >= _CONTINUED:
        octets.append(value & 127 | _CONTINUED)
        value >>= 7
    octets.append(value)
    return bytes(octets)


encode_varint = lru_cache(maxsize=1024)(write_varint)
"""Write a number such as a size, and remember it."""


def delimited(tag: bytes, value: Buffer) -> tuple[bytes, Buffer]:
    """Give a field's value, and what stands before it: tag and size."""
    return tag + encode_varint(len(value)), value
