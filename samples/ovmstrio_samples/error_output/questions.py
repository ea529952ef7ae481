"""No calls for the demo: a call without a stream needs all outputs, and this graph never gives both."""

from __future__ import annotations

from ovmstrio_samples.question import Question

__all__ = ["questions"]


def questions() -> list[Question]:
    """Give no call."""
    return []
