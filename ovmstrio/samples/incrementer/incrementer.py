"""Python code of all three nodes, which adds one to the input."""

from __future__ import annotations

from typing import Any

import numpy as np

from pyovms import Tensor


class OvmsPythonModel:
    """Node that adds one to every element of a tensor of any shape and numeric type."""

    def initialize(self, kwargs: dict[str, Any]) -> None:
        """Store the name of the node's output."""
        self.output_name: str = kwargs["output_names"][0]

    def execute(self, inputs: list[Tensor]) -> list[Tensor]:
        """Add one to one tensor."""
        numbers = np.asarray(inputs[0])
        return [Tensor(self.output_name, numbers + numbers.dtype.type(1))]
