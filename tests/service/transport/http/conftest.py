"""Requests for either lane of the HTTP front end."""

from __future__ import annotations

from tests.service.protocols.kserve.rest.conftest import serving
from tests.unit.protocols.servers import infer_head

__all__ = ["GET_METADATA", "MEBIBYTE", "SLOW_BODY", "chunk", "chunked", "serving"]

MEBIBYTE = 2**20
GET_METADATA = b"GET /v2/models/echo HTTP/1.1\r\nHost: h\r\n\r\n"
SLOW_BODY = b'{"parameters":{"block":1},"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1]}]}'
"""Body of an inference that waits until it is cancelled."""


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def chunked(body: bytes, *extra: str, model: str = "echo", suffix: str = "") -> bytes:
    """Return an inference in chunks, which the application answers and not the fast lane."""
    head = infer_head(None, "Transfer-Encoding: chunked", *extra, model=model, suffix=suffix)
    return head + chunk(body) + b"0\r\n\r\n"
