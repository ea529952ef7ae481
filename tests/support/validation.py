"""The validation of one request."""

from __future__ import annotations

from collections.abc import Sequence

from ovmstrio.core.request import InferRequest
from ovmstrio.core.tensor import Array, TensorSpec
from ovmstrio.runtimes.models.validation import Validator


def validate(request: InferRequest, inputs: Sequence[TensorSpec]) -> dict[str, Array]:
    return Validator(inputs)(request)
