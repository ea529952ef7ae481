"""The statuses of gRPC by their numbers: their names, and those of HTTP that say the same."""

from __future__ import annotations

from typing import Final

__all__ = ["GRPC_STATUSES", "http_status_of"]

_HTTP_STATUSES: Final = {
    "OK": 200,
    "CANCELLED": 499,
    "UNKNOWN": 500,
    "INVALID_ARGUMENT": 400,
    "DEADLINE_EXCEEDED": 504,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "PERMISSION_DENIED": 403,
    "RESOURCE_EXHAUSTED": 429,
    "FAILED_PRECONDITION": 400,
    "ABORTED": 409,
    "OUT_OF_RANGE": 400,
    "UNIMPLEMENTED": 501,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DATA_LOSS": 500,
    "UNAUTHENTICATED": 401,
}
"""In the order of their numbers."""

GRPC_STATUSES: Final = tuple(_HTTP_STATUSES)
"""Their names."""


def http_status_of(status: int) -> int:
    """Give the status of HTTP that says the same."""
    return _HTTP_STATUSES[GRPC_STATUSES[status]]
