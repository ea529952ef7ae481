"""Calls for the demo: none, because a call without a stream needs all outputs, and this graph never sends both."""

from __future__ import annotations

from ovmstrio.samples.question import Question

__all__ = ["questions"]


def questions() -> list[Question]:
    """Return no calls."""
    return []
