"""Client of the sample image_classifier: ``python -m ovmstrio.samples.image_classifier.client --input PICTURE...``."""

from __future__ import annotations

import numpy as np

from ovmstrio import Array
from ovmstrio.samples import pictures
from ovmstrio.samples.asking import arguments, main
from ovmstrio.samples.question import Arrays, Question

__all__ = ["ask_about"]


def _read(outputs: Arrays) -> str:
    probabilities = outputs["probabilities"].reshape(-1)
    best = np.argsort(probabilities)[::-1][:3]
    return ", ".join(f"class {number} ({probabilities[number]:.0%})" for number in best)


def ask_about(subject: str, rgb: Array, expected: str = "") -> Question:
    """Create the call for one picture, UINT8 [height,width,3]; the model resizes it."""
    return Question("image_classifier", subject, {"images": rgb[np.newaxis]}, expected, _read)


if __name__ == "__main__":
    options = arguments(
        "What is in these pictures, in ImageNet's numbering?", model="image_classifier", file="PICTURE", required=True
    )
    main(options, [ask_about(str(path), pictures.read(path)) for path in options.input])
