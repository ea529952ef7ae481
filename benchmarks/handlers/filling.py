"""Gives an array of its own, as large as its input."""

import numpy as np

from pyovms import Tensor


class OvmsPythonModel:
    """One node whose output is a large array that it has made."""

    def execute(self, inputs: list[Tensor]) -> list[Tensor]:
        """Give as many bytes as came."""
        return [Tensor("out", np.full(inputs[0].size, 7, np.uint8))]
