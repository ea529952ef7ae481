"""The body of the framework's request, as it was before it was encoded for the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quart import request

from ovmstrio.api.doors import KSERVE_REST
from ovmstrio.api.kserve.rest.infer_route import inflate
from ovmstrio.core.errors import ServerError

if TYPE_CHECKING:
    from ovmstrio.core.events import Door
    from ovmstrio.dataplane.plane import DataPlane

__all__ = ["read_body"]


async def read_body(plane: DataPlane, model: str, version: str, limit: int, door: Door = KSERVE_REST) -> bytes:
    """Read the whole body of a call to a servable.

    Raises:
        InvalidRequest: its encoding is unknown or broken; the call has been counted then.
        PayloadTooLarge: it is larger than ``limit``.

    Cancellation: while it comes in; nothing is held.
    """
    sent: Any = await request.get_data()
    try:
        return inflate(sent, request.headers.get("Content-Encoding", "").strip().lower(), limit)
    except ServerError as error:
        plane.count_unparsed(model, version, error, door, len(sent))
        raise
