"""The words in which requests are refused: OVMS's fixed texts, with the facts behind them.

Clients of OpenVINO Model Server match on the fixed part, so it always comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.tensor import TensorSpec

__all__ = ["BOTH_STYLES", "mismatch", "refused", "show_shape"]

BOTH_STYLES: Final = "Passing data both in InferInputTensor::contents and in raw_input_contents is not allowed"


def show_shape(dims: Sequence[object]) -> str:
    """Print a shape as messages show it: ``(1,3,[2~8],-1)``."""
    return f"({','.join(map(str, dims))})"


def refused(fixed: str, detail: str = "") -> InvalidRequest:
    """Make the error for one refusal."""
    return InvalidRequest(f"{fixed} - {detail}" if detail else fixed)


def mismatch(fixed: str, expected: object, actual: object, spec: TensorSpec) -> InvalidRequest:
    """Make the error for an input that is not what the model expects."""
    return refused(fixed, f"Expected: {expected}; Actual: {actual}; input name: {spec.name}")
