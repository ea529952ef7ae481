"""Calls whose services are named inside their messages: a place is taken before anything else of the message is read.

The name is the first field, as every usual client writes it.  A message that says another name further on, which
counts then, takes its place when that is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from ovmstrio.core.limits import current_place, leave_place

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ovmstrio.core.events import Door
    from ovmstrio.core.request import Arrival
    from ovmstrio.serving.data_plane import DataPlane

__all__ = ["answer_admitted", "first_text", "keep_place"]

_T = TypeVar("_T")

_DELIMITED: Final = 2
_FIRST_TEXT: Final = 1 << 3 | _DELIMITED
_MAX_BYTES: Final = 4096
_CONTINUED: Final = 128


def first_text(data: bytes | memoryview) -> bytes:
    """Give the value of field 1 where a message begins with it, and it is not long; nothing for any other message."""
    if not data or data[0] != _FIRST_TEXT:
        return b""
    length = shift = 0
    for position, byte in enumerate(data[1:4], 2):
        length |= (byte & (_CONTINUED - 1)) << shift
        shift += 7
        if byte < _CONTINUED:
            return bytes(data[position : position + length]) if length <= _MAX_BYTES else b""
    return b""


async def answer_admitted(
    plane: DataPlane,
    door: Door,
    name: bytes,
    answer: Callable[[], Awaitable[_T]],
    *,
    method: str = "",
    arrival: Arrival | None = None,
) -> _T:
    """Answer a call that has a place of a service, if there is one of that name.

    Args:
        plane: has the service.
        door: which the call has come by.
        name: what its message begins with.
        answer: reads the message and answers the call.
        method: what is called; by default the door's inference.
        arrival: the call's, if its order matters.

    Raises:
        Overloaded: it would have to wait, and as many wait as may.

    Cancellation: while it waits; as what answers.
    """
    place = await plane.admit(name.decode(errors="replace"), "", door, method or door.infer, arrival)
    if place is None:
        return await answer()
    current_place.set(place)
    try:
        return await answer()
    finally:
        place.release()


def keep_place(called: str, name: bytes) -> None:
    """Give the place of a call back unless it calls what its first bytes have said."""
    if called.encode(errors="replace") != name:
        leave_place()
