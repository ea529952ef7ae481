"""What tests read out of responses."""

from __future__ import annotations

from ovmstrio.core.request import InferResponse
from ovmstrio.core.tensor import Tensor


def tensors(response: InferResponse) -> list[Tensor]:
    outputs = [output for output in response.outputs if isinstance(output, Tensor)]
    assert len(outputs) == len(response.outputs)
    return outputs
