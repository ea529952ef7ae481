"""The number of a process among those that are one server, in every line that it logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import MutableMapping

__all__ = ["add_worker_number", "set_worker_number"]

_number: int | None = None


def set_worker_number(number: int | None) -> None:
    """Say which one this process is; None if it is the server alone, or what the others are started by."""
    global _number  # noqa: PLW0603 - a process is one, and its log is one
    _number = number


def add_worker_number(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add the number, if there is one; a processor of structlog's."""
    if _number is not None:
        event.setdefault("worker", _number)
    return event
