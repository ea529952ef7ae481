"""Client of the sample iris, which classifies rows 1, 51 and 101 of Fisher's data set."""

from __future__ import annotations

import numpy as np

from ovmstrio.samples.asking import arguments, main
from ovmstrio.samples.iris.flowers import FLOWERS
from ovmstrio.samples.iris.prepare import coefficients
from ovmstrio.samples.question import Arrays, Question

__all__ = ["questions", "species"]


def species(label: int) -> str:
    """Return the name of the species with the model's label."""
    return str(coefficients()["classes"][label])


def _read(outputs: Arrays) -> str:
    label = int(outputs["label"].reshape(-1)[0])
    if label != int(outputs["probabilities"].reshape(-1).argmax()):
        return f"label {label} is not the most probable class"
    return species(label)


def questions() -> list[Question]:
    """Return one call for each flower."""
    return [
        Question(
            model="iris",
            subject=f"{' x '.join(map(str, sizes))} cm",
            inputs={"features": np.array([sizes], np.float32)},
            expected=name,
            read=_read,
        )
        for sizes, name in FLOWERS
    ]


if __name__ == "__main__":
    main(arguments("Classify three flowers.", model="iris"), questions())
