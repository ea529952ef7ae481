"""Texts in the charsets that their senders name."""

from __future__ import annotations

import codecs
from typing import Final

__all__ = ["decoded"]

_SLOW: Final = frozenset({"idna", "punycode"})
"""Of names of hosts; Python takes time by the square of a text's length for them."""


def decoded(data: bytes, charset: str) -> str:
    """Give a text that can be written in UTF-8 again, in time that grows with its length.

    Raises:
        LookupError: there is no such charset of texts.
        ValueError: the text is not in it, or has halves of letters.
    """
    if codecs.lookup(charset).name in _SLOW:
        raise LookupError(f"unknown encoding: {charset}")
    text = data.decode(charset)
    if not text.isascii():
        text.encode()
    return text
