"""Repeated numbers of a message as values that a servable can check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["read_elements"]

_LIST_UP_TO: Final = 64
"""Number of elements up to which a list costs less than an array."""


def read_elements(
    message: Any, field: str, dtype: np.dtype[Any], *, packed: bool
) -> Sequence[Any] | np.ndarray[Any, Any]:
    """Give the elements of a repeated field; the message must not be used any more afterwards.

    Args:
        message: one of Google's.
        field: the field's name.
        dtype: numpy's type for the elements.
        packed: protobuf packs the elements as numpy does.
    """
    elements = getattr(message, field)
    count = len(elements)
    if count <= _LIST_UP_TO:
        return list(elements)
    if not packed:
        return np.fromiter(elements, dtype, count)
    # Written alone, the field is a tag, its size and then the elements as numpy has them.
    for other, _ in message.ListFields():
        if other.name != field:
            message.ClearField(other.name)
    message.DiscardUnknownFields()
    serialised: bytes = message.SerializeToString()
    return np.frombuffer(serialised, dtype, offset=len(serialised) - count * dtype.itemsize)
