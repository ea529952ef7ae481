"""Statuses as handlers write them."""

from __future__ import annotations

from typing import Any

from grpclib.const import Status

__all__ = ["status_of_code"]


def status_of_code(code: Any) -> Status:
    """Translate a ``grpc.StatusCode``, its number or its name.

    Raises:
        ValueError: there is no such status.
    """
    value = getattr(code, "value", code)
    number = value[0] if isinstance(value, tuple) else value
    try:
        return Status[number.upper()] if isinstance(number, str) else Status(number)
    except (KeyError, ValueError):
        raise ValueError(f"{code!r} is no status of gRPC; expected one of grpc.StatusCode") from None
