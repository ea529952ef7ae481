"""Python node that inverts a matrix or returns an error message."""

from __future__ import annotations

import numpy as np

from pyovms import Tensor


class OvmsPythonModel:
    """Node with two outputs, result and error message, so that a bad request does not end the stream."""

    def execute(self, inputs: list[Tensor]) -> list[Tensor]:
        """Invert one square matrix."""
        try:
            inverse = np.linalg.inv(np.asarray(inputs[0]))
        except np.linalg.LinAlgError as error:
            return [Tensor("error_message", str(error).encode())]
        return [Tensor("result", inverse)]
