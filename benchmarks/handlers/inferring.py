"""Node that streams inferences."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as op

from pyovms import Tensor

_SETTINGS = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": "1"}


class OvmsPythonModel:
    """Generative node whose outputs are inferences of an addition model."""

    def initialize(self, _kwargs: dict[str, Any]) -> None:
        """Compile the model."""
        given = op.parameter([1, 10], np.float32)
        model = ov.Model([op.result(op.add(given, np.float32(1)))], [given], "addition")
        self.model = ov.Core().compile_model(model, "CPU", _SETTINGS)

    def execute(self, inputs: list[Tensor]) -> Iterator[list[Tensor]]:
        """Yield as many outputs as the input says."""
        request, array = self.model.create_infer_request(), np.zeros((1, 10), np.float32)
        for _ in range(int(bytes(inputs[0]))):
            array = request.infer([array])[0]
            yield [Tensor("out", array)]
