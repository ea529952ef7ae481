"""The handler: the inverse of a matrix, or why there is none."""

from __future__ import annotations

import numpy as np

from pyovms import Tensor


class OvmsPythonModel:
    """Answers every request on one of two outputs, so that a bad one does not end the stream."""

    def execute(self, inputs: list[Tensor]) -> list[Tensor]:
        """Invert one square matrix."""
        try:
            inverse = np.linalg.inv(np.asarray(inputs[0]))
        except np.linalg.LinAlgError as error:
            return [Tensor("error_message", str(error).encode())]
        return [Tensor("result", inverse)]
