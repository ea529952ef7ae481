"""Base64 text as clients send it."""

from __future__ import annotations

from binascii import a2b_base64


def decode_base64(text: str) -> bytes:
    """Decode text in the standard alphabet; as in OVMS and TensorFlow Serving, line breaks and no padding are allowed.

    Raises:
        ValueError: the text is not base64.
    """
    try:
        return a2b_base64(text.encode(), strict_mode=True)
    except ValueError:
        compact = "".join(text.split())
        return a2b_base64((compact + "=" * (-len(compact) % 4)).encode(), strict_mode=True)
