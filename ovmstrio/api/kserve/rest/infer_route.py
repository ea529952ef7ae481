"""The inference route itself, shared by the fast lane and the application."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final

import structlog

from ovmstrio.api.doors import KSERVE_REST, VERSION_MISSING
from ovmstrio.api.kserve.rest.infer_answer import render_infer_answer
from ovmstrio.api.kserve.rest.infer_request import read_infer_request
from ovmstrio.core.errors import InvalidRequest, NotFound, PayloadTooLarge, ServerError
from ovmstrio.wire.http.answers import Answer, error_answer, failure_answer

if TYPE_CHECKING:
    from ovmstrio.core.request import Buffer, InferResponse
    from ovmstrio.dataplane.plane import DataPlane

__all__ = ["answer_infer", "check_version", "inflate", "size_refusal"]

log = structlog.get_logger(__name__)

_WINDOW_BITS: Final = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}

_MAX_VERSION: Final = 2**63 - 1


def check_version(version: str) -> str:
    """Give a version of a path back if it may name one; an empty one is the default.

    Raises:
        InvalidRequest: it is not a whole number.
        NotFound: it is larger than any version can be.
    """
    if version and not (version.isascii() and version.isdigit()):
        raise InvalidRequest(f'Model version must be an integer, got "{version[:40]}"')
    if version and (len(version) > len(str(_MAX_VERSION)) or int(version) > _MAX_VERSION):
        raise NotFound(VERSION_MISSING)
    return version


async def answer_infer(plane: DataPlane, model: str, version: str, body: Buffer, head_length: str | None) -> Answer:
    """Read the body, infer, and render the answer, or the refusal.

    Raises: nothing but cancellation; every failure becomes an answer.

    Ownership: ``body`` must stay unchanged until this returns.
    Cancellation: at any checkpoint of the servable.
    """
    try:
        try:
            request = read_infer_request(model, version, body, head_length)
        except ServerError as error:
            plane.count_unparsed(model, version, error, KSERVE_REST, len(body))
            raise
        check_version(version)
        request.received = len(body)

        def render(response: InferResponse) -> tuple[Answer, int]:
            answer = render_infer_answer(request, response)
            return answer, len(answer.body)

        return await plane.infer(request, KSERVE_REST, render)
    except ServerError as error:
        return error_answer(error)
    except Exception:  # the border of one request
        log.exception("request failed", model=model, version=version)
        return failure_answer()


def size_refusal(size: int | str, limit: int) -> PayloadTooLarge:
    """Make the refusal of a body that is too large."""
    return PayloadTooLarge(f"the body has {size} bytes, the limit is {limit} (--max_message_size)")


def inflate(body: bytes, encoding: str, limit: int) -> bytes:
    """Undo a body's ``Content-Encoding``.

    Raises:
        InvalidRequest: the encoding is unknown, or the body is not encoded so.
        PayloadTooLarge: what comes out is larger than ``limit``.
    """
    if encoding in {"", "identity"}:
        return body
    bits = _WINDOW_BITS.get(encoding)
    if bits is None:
        raise InvalidRequest(f"Content-Encoding {encoding[:40]!r} is not supported; use gzip, deflate or none")
    inflater = zlib.decompressobj(bits)
    try:
        inflated = inflater.decompress(body, limit + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not {encoding}: {error}") from None
    if len(inflated) > limit:
        raise size_refusal(f"more than {limit}", limit)
    if not inflater.eof or inflater.unused_data:
        raise InvalidRequest(f"the body is not {encoding}: it {'goes on' if inflater.eof else 'ends too early'}")
    return inflated
