"""``add_one``: adds a number to ten numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

import numpy as np

from ovmstrio.core.tensor import Array
from ovmstrio.pipelines.builtin.builtin_node import Parameters, describe_item

_SHAPE: Final = (1, 10)
_QUEUES: Final = ("output_queue_size", "info_queue_size")


class AddOne:
    """Adds ``add_number`` and subtracts ``sub_number``.

    The sizes of OVMS's buffer queues are checked and otherwise ignored.
    """

    is_instant: ClassVar = True

    def __init__(self, parameters: Parameters) -> None:
        self.inputs = {"input_numbers": describe_item("input_numbers", "FP32", *_SHAPE)}
        self.outputs = {"output_numbers": describe_item("output_numbers", "FP32", *_SHAPE)}
        self._added = np.float32(parameters.integer("add_number", default=1, low=0))
        self._subtracted = np.float32(parameters.integer("sub_number", default=0, low=0))
        for name in _QUEUES:
            parameters.integer(name, default=1)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the sums."""
        return {"output_numbers": inputs["input_numbers"] + self._added - self._subtracted}
