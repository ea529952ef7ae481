"""Client of the sample add_one."""

from __future__ import annotations

import numpy as np

from ovmstrio.samples.asking import arguments, main
from ovmstrio.samples.question import Arrays, Question

__all__ = ["questions"]


def _read(outputs: Arrays) -> str:
    return " ".join(f"{value:g}" for value in outputs["y"].reshape(-1))


def questions() -> list[Question]:
    """Return one call: 0 to 9 become 1 to 10."""
    counted = np.arange(10, dtype=np.float32).reshape(1, 10)
    return [Question("add_one", "0 1 2 ... 9", {"x": counted}, "1 2 3 4 5 6 7 8 9 10", _read)]


if __name__ == "__main__":
    main(arguments("Add one to the numbers 0 to 9.", model="add_one"), questions())
