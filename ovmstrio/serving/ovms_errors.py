"""What OVMS says to requests that nothing answers, and to bodies that cannot be taken; and the document of states."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import InvalidRequest, MethodNotAllowed, ServerError
from ovmstrio.encoding.inflate import (
    DEFLATE_BITS,
    GZIP_BITS,
    Inflation,
    InflationError,
    InflationTooLargeError,
    in_inflating_thread,
)
from ovmstrio.serving.interfaces import KSERVE_REST
from ovmstrio.transport.http.responses import error_answer, size_refusal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ovmstrio.core.events import Door
    from ovmstrio.core.http import HttpAnswer, HttpRequest
    from ovmstrio.core.limits import CallPlace
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.serving.records import VersionStatus

__all__ = [
    "INVALID_URL",
    "UNSUPPORTED_METHOD",
    "OvmsRefusals",
    "admits",
    "body_of_call",
    "inflated_body",
    "status_document",
]

_AT_ONCE_BYTES: Final = 2048
"""Of a body that becomes a thousand times as large at most."""

_BITS: Final = {"gzip": GZIP_BITS, "x-gzip": GZIP_BITS, "deflate": DEFLATE_BITS}


def admits(plane: DataPlane, door: Door) -> Callable[..., Awaitable[CallPlace | None]]:
    """Make what takes a place of the model that a path names."""

    async def admit(_method: str, model: str, version: str = "") -> CallPlace | None:
        return await plane.admit(model, version, door) if plane.has_limits() else None

    return admit


async def body_of_call(
    plane: DataPlane, request: HttpRequest, model: str, version: str, *, limit: int, door: Door = KSERVE_REST
) -> bytes:
    """Give the body of a call to a servable.

    Raises:
        InvalidRequest: its encoding is unknown or broken; the call has been counted then.
        PayloadTooLarge: what comes out is larger than ``limit``; likewise.

    Cancellation: as :func:`inflated_body`.
    """
    try:
        return await inflated_body(request, limit)
    except ServerError as error:
        plane.count_unparsed(model, version, error, door, len(request.body))
        raise


async def inflated_body(request: HttpRequest, limit: int) -> bytes:
    """Undo a body's ``Content-Encoding``, in a thread where much may come out; no checkpoint without an encoding.

    Raises:
        InvalidRequest: the encoding is unknown, or the body is not encoded so.
        PayloadTooLarge: what comes out is larger than ``limit``.

    Cancellation: while others are under way; not while it is done, which is bounded by ``limit``.
    """
    said, body = request.header("content-encoding"), request.body
    if said is None:
        return body
    encoding = said.strip().lower()
    if len(body) <= _AT_ONCE_BYTES:
        return _inflated(body, encoding, limit)
    return await in_inflating_thread(partial(_inflated, body, encoding, limit))


def _inflated(body: bytes, encoding: str, limit: int) -> bytes:
    if encoding in {"", "identity"}:
        return body
    bits = _BITS.get(encoding)
    if bits is None:
        raise InvalidRequest(f"Content-Encoding {encoding[:40]!r} is not supported; use gzip, deflate or none")
    inflation = Inflation(body, bits, limit)
    # The errors below lead to this frame, and may live longer than the request.
    del body
    try:
        inflated = inflation.finish()
    except InflationTooLargeError:
        raise size_refusal(f"more than {limit}", limit) from None
    except InflationError as error:
        raise InvalidRequest(f"the body is not {encoding}: {error}") from None
    if inflation.has_more:
        del inflated, inflation
        raise InvalidRequest(f"the body is not {encoding}: it goes on")
    return inflated


def status_document(versions: Sequence[VersionStatus]) -> dict[str, Any]:
    """Describe versions; the reason of a failure is an addition to OVMS's form."""
    return {"model_version_status": [_entry(status) for status in versions]}


def _entry(status: VersionStatus) -> dict[str, Any]:
    said = {"error_code": status.error_code, "error_message": status.error_code}
    if status.reason:
        said["reason"] = status.reason
    return {"version": str(status.version), "state": status.state.name, "status": said}


INVALID_URL: Final = "Invalid request URL"
UNSUPPORTED_METHOD: Final = "Unsupported method"


class OvmsRefusals:
    """The refusals of a server that speaks as OVMS."""

    def no_path(self, method: str, path: str) -> HttpAnswer:
        """Answer for a path that there is not."""
        return error_answer(InvalidRequest(f"{INVALID_URL} - {method} {path}"))

    def no_method(self, method: str, path: str) -> HttpAnswer:
        """Answer for a method that there is not, or not for this path."""
        return error_answer(MethodNotAllowed(f"{UNSUPPORTED_METHOD} - {method} {path}"))
