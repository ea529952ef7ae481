"""OVMS-compatible refusals of unroutable requests, request body decompression, and the model status document."""

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
from ovmstrio.transport.http.responses import body_too_large_error, error_response
from ovmstrio.util.truncation import shown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from ovmstrio.core.events import ApiInterface
    from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
    from ovmstrio.core.limits import AdmissionTicket
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.serving.records import VersionStatus

_ON_LOOP_BYTES: Final = 2048
"""Compressed size that is inflated on the event loop: the result is at most a thousand times as large."""

_WINDOW_BITS: Final = {"gzip": GZIP_BITS, "x-gzip": GZIP_BITS, "deflate": DEFLATE_BITS}


def make_admission(plane: DataPlane, api_interface: ApiInterface) -> Callable[..., Awaitable[AdmissionTicket | None]]:
    """Return the admission function for routes with a model and a version in their path."""

    async def admit(_method: str, model: str, version: str = "") -> AdmissionTicket | None:
        return await plane.admit(model, version, api_interface) if plane.has_limits() else None

    return admit


async def decompressed_call_body(
    plane: DataPlane,
    request: HttpRequest,
    model: str,
    version: str,
    *,
    limit: int,
    api_interface: ApiInterface = KSERVE_REST,
) -> bytes:
    """Return the decompressed body of a call; count the call if that fails.  Raises as :func:`decompressed_body`."""
    try:
        return await decompressed_body(request, limit)
    except ServerError as error:
        plane.count_unreadable_call(model, version, error, api_interface, len(request.body))
        raise


async def decompressed_body(request: HttpRequest, limit: int) -> bytes:
    """Undo a body's ``Content-Encoding``, in a thread if the body is large; no checkpoint without an encoding.

    Raises:
        InvalidRequest: the encoding is unknown, or the body is invalid.
        PayloadTooLarge: the result is larger than ``limit``.
    """
    header, body = request.header("content-encoding"), request.body
    if header is None:
        return body
    encoding = header.strip().lower()
    if len(body) <= _ON_LOOP_BYTES:
        return _inflated(body, encoding, limit)
    return await in_inflating_thread(partial(_inflated, body, encoding, limit))


def _inflated(body: bytes, encoding: str, limit: int) -> bytes:
    if encoding in {"", "identity"}:
        return body
    bits = _WINDOW_BITS.get(encoding)
    if bits is None:
        raise InvalidRequest(f"Content-Encoding {shown(encoding, 40)} is not supported; use gzip, deflate or none")
    inflation = Inflation(body, bits, limit)
    # The errors below keep this frame alive, possibly longer than the request.
    del body
    try:
        inflated = inflation.finish()
    except InflationTooLargeError:
        raise body_too_large_error(f"more than {limit}", limit) from None
    except InflationError as error:
        raise InvalidRequest(f"the body is not {encoding}: {error}") from None
    if inflation.has_more:
        del inflated, inflation
        raise InvalidRequest(f"{encoding} body has trailing data")
    return inflated


def status_document(versions: Sequence[VersionStatus]) -> dict[str, Any]:
    """Return TensorFlow Serving's model status document; the failure ``reason`` is our extension."""
    return {"model_version_status": [_entry(status) for status in versions]}


def _entry(status: VersionStatus) -> dict[str, Any]:
    details = {"error_code": status.error_code, "error_message": status.error_code}
    if status.reason:
        details["reason"] = status.reason
    return {"version": str(status.version), "state": status.state.name, "status": details}


INVALID_URL: Final = "Invalid request URL"
UNSUPPORTED_METHOD: Final = "Unsupported method"


class OvmsRouteErrors:
    """Responses to requests without a route, with OVMS's texts."""

    def no_path(self, method: str, path: str) -> HttpAnswer:
        """Return the response to an unknown path."""
        return error_response(InvalidRequest(f"{INVALID_URL} - {method} {path}"))

    def no_method(self, method: str, path: str, allowed: Collection[str] = ()) -> HttpAnswer:
        """Return the response to an unsupported method."""
        hint = f"; use {' or '.join(sorted(allowed))}" if allowed else ""
        return error_response(MethodNotAllowed(f"{UNSUPPORTED_METHOD} - {method} {path}{hint}"))
