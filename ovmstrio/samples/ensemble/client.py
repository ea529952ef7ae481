"""Client of the sample ensemble: ``python -m ovmstrio.samples.ensemble.client``."""

from __future__ import annotations

import numpy as np

from ovmstrio.samples.asking import arguments, main
from ovmstrio.samples.iris.flowers import FLOWERS
from ovmstrio.samples.question import Arrays, Question

__all__ = ["DOUBTFUL", "questions"]

DOUBTFUL = (4.9, 2.5, 4.5, 1.7)
"""Row 107 of Fisher's data set, a virginica that naive Bayes alone classifies as versicolor."""


def _read(outputs: Arrays) -> str:
    (name,), (agreed,) = outputs["species"], outputs["agreed"]
    return f"{name.decode()}{'' if agreed else ', disputed'}"


def questions() -> list[Question]:
    """Return one call for each of four flowers; the models disagree on the last one."""
    flowers = [*FLOWERS, (DOUBTFUL, "virginica, disputed")]
    return [
        Question(
            model="ensemble",
            subject=f"{' x '.join(map(str, sizes))} cm",
            inputs={"features": np.array([sizes], np.float32)},
            expected=answer,
            read=_read,
        )
        for sizes, answer in flowers
    ]


if __name__ == "__main__":
    main(arguments("Classify flowers with two models.", model="ensemble"), questions())
