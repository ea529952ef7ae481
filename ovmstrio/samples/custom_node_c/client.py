"""Client of the sample custom_node_c: ``python -m ovmstrio.samples.custom_node_c.client``."""

from __future__ import annotations

import numpy as np

from ovmstrio.samples.asking import arguments, main
from ovmstrio.samples.question import Arrays, Question

__all__ = ["questions"]


def _read(outputs: Arrays) -> str:
    (which,) = outputs["which"]
    return f"variant {which}: {' '.join(f'{value:g}' for value in outputs['best'].reshape(-1))}"


def questions() -> list[Question]:
    """Return two calls: of the numbers times 1, -1 and 0.5, plus one, the pipeline selects the largest sum."""
    counted = np.arange(10, dtype=np.float32).reshape(1, 10)
    return [
        Question("custom_node_c", "0 1 2 ... 9", {"numbers": counted}, "variant 0: 1 2 3 4 5 6 7 8 9 10", _read),
        Question("custom_node_c", "0 -1 -2 ... -9", {"numbers": -counted}, "variant 1: 1 2 3 4 5 6 7 8 9 10", _read),
    ]


if __name__ == "__main__":
    main(arguments("Select the variant with the largest sum.", model="custom_node_c"), questions())
