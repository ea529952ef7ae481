"""Errors for invalid requests: OVMS's fixed texts followed by details.

Clients of OpenVINO Model Server match on the fixed part, so it always comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ovmstrio.core.errors import InvalidRequest
from ovmstrio.core.tensor import TensorSpec

DUPLICATE_CONTENTS: Final = "Passing data both in InferInputTensor::contents and in raw_input_contents is not allowed"


def format_shape(dims: Sequence[object]) -> str:
    """Format a shape as in messages: ``(1,3,[2~8],-1)``."""
    return f"({','.join(map(str, dims))})"


def invalid_request(fixed: str, detail: str = "") -> InvalidRequest:
    """Create an error with an OVMS text and a detail."""
    return InvalidRequest(f"{fixed} - {detail}" if detail else fixed)


def input_mismatch(fixed: str, expected: object, actual: object, spec: TensorSpec) -> InvalidRequest:
    """Create the error for an input that does not match the model."""
    return invalid_request(fixed, f"Expected: {expected}; Actual: {actual}; input name: {spec.name}")
