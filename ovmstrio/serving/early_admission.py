"""Early admission: takes a place for a call as soon as the service name in its message is known.

Usual clients write the name as the first field.  A message that repeats the field with another name, which then counts,
takes its place when that is decoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from ovmstrio.core.limits import current_ticket, release_current_ticket

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ovmstrio.core.events import ApiInterface
    from ovmstrio.core.request import ArrivalTicket
    from ovmstrio.serving.data_plane import DataPlane

_T = TypeVar("_T")

_DELIMITED: Final = 2
_FIRST_TEXT: Final = 1 << 3 | _DELIMITED
_MAX_BYTES: Final = 4096
_CONTINUED: Final = 128


def first_string_field(data: bytes | memoryview) -> bytes:
    """Return the value of protobuf field 1 if a message starts with it and it is short; otherwise empty."""
    if not data or data[0] != _FIRST_TEXT:
        return b""
    length = shift = 0
    for position, byte in enumerate(data[1:4], 2):
        length |= (byte & (_CONTINUED - 1)) << shift
        shift += 7
        if byte < _CONTINUED:
            return bytes(data[position : position + length]) if length <= _MAX_BYTES else b""
    return b""


async def call_with_place(
    plane: DataPlane,
    door: ApiInterface,
    name: bytes,
    answer: Callable[[], Awaitable[_T]],
    *,
    method: str = "",
    arrival: ArrivalTicket | None = None,
) -> _T:
    """Take a place for the service that the message names, if there is one, and call ``answer``.

    ``method`` is the metric label, by default the interface's inference; ``arrival`` is set if the order matters.

    Raises:
        Overloaded: the queue is full.
    """
    place = await plane.admit(name.decode(errors="replace"), "", door, method or door.infer, arrival)
    if place is None:
        return await answer()
    current_ticket.set(place)
    try:
        return await answer()
    finally:
        place.release()


def release_unless_named(called: str, name: bytes) -> None:
    """Release the place of a call if the decoded name differs from the first bytes."""
    if called.encode(errors="replace") != name:
        release_current_ticket()
