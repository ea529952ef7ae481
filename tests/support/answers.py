"""What tests read out of responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.core.tensor import Tensor

if TYPE_CHECKING:
    from ovmstrio.core.request import InferResponse

__all__ = ["tensors"]


def tensors(response: InferResponse) -> list[Tensor]:
    """Give the outputs of a model, which are arrays of known types."""
    outputs = [output for output in response.outputs if isinstance(output, Tensor)]
    assert len(outputs) == len(response.outputs)
    return outputs
