"""Calls with known answers, for the demo; without a stream, labels and picture are in one request."""

from __future__ import annotations

import numpy as np

from ovmstrio.samples.question import Arrays, Question

__all__ = ["questions"]


def _read(outputs: Arrays) -> str:
    return outputs["result"].tobytes().decode()


def questions() -> list[Question]:
    """Return one call with a dark blue picture."""
    inputs = {
        "labels": np.array([b"gold,navy,crimson"], object),
        "image": np.full((4, 4, 3), (0, 0, 90), np.uint8),
    }
    return [Question("labels_image", "a dark blue picture", inputs, "navy", _read)]
