"""The handler of all three nodes: what comes in goes out one larger."""

from __future__ import annotations

from typing import Any

import numpy as np

from pyovms import Tensor


class OvmsPythonModel:
    """Adds one to every number of a tensor of any shape and any numeric type."""

    def initialize(self, kwargs: dict[str, Any]) -> None:
        """Note under which name the node sends its output."""
        self.output_name: str = kwargs["output_names"][0]

    def execute(self, inputs: list[Tensor]) -> list[Tensor]:
        """Handle one tensor."""
        numbers = np.asarray(inputs[0])
        return [Tensor(self.output_name, numbers + numbers.dtype.type(1))]
