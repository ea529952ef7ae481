"""Client of the sample orientation: ``python -m ovmstrio.samples.orientation.client [--input PICTURE...]``."""

from __future__ import annotations

from typing import Final

import numpy as np

from ovmstrio import Array
from ovmstrio.samples import pictures
from ovmstrio.samples.asking import arguments, main
from ovmstrio.samples.question import Arrays, Question

__all__ = ["ask_about", "questions"]

_ANGLES: Final = ("0", "90", "180", "270")
_TEXT: Final = (
    "A page can lie in four ways, and a scanner",
    "does not mind which of them it gets. A reader",
    "wants to read it afterwards does: letters are",
    "not the same upside down, and so a small model",
    "looks at the page first, and says by how far it",
    "was turned clockwise before it was put there.",
)


def _read(outputs: Arrays) -> str:
    (scores,) = outputs.values()
    return f"{_ANGLES[int(scores.reshape(-1).argmax())]} degrees"


def ask_about(subject: str, rgb: Array, expected: str = "") -> Question:
    """Create the call for one picture, UINT8 [height,width,3]."""
    return Question("orientation", subject, {"x": pictures.imagenet_input(rgb)}, expected, _read)


def questions() -> list[Question]:
    """Return calls with one page, turned clockwise to each of the four orientations."""
    upright = pictures.page(_TEXT)
    return [
        ask_about(f"a page turned by {angle}", np.rot90(upright, -turns), f"{angle} degrees")
        for turns, angle in enumerate(_ANGLES)
    ]


if __name__ == "__main__":
    options = arguments("Detect the orientation of pages.", model="orientation", file="PICTURE")
    calls = [ask_about(str(path), pictures.read(path)) for path in options.input]
    main(options, calls or questions())
