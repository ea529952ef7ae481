"""Calls with known answers, for the demo; a call without a stream gets the first value of each output."""

from __future__ import annotations

import numpy as np

from ovmstrio.samples.question import Arrays, Question

__all__ = ["questions"]


def _read(outputs: Arrays) -> str:
    return f"{outputs['word'].tobytes().decode()} ({outputs['count'][0]} words)"


def questions() -> list[Question]:
    """Return one call, for the first word of four and their number."""
    text = np.array([b"one request, many responses"], object)
    return [Question("counter_stream", "a text, without a stream", {"text": text}, "one (4 words)", _read)]
