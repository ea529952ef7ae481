"""Responses in the form of Triton's generate extension: a flat JSON object, alone or as a server-sent event."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson

from ovmstrio.api.kserve.rest.infer_answer import json_values
from ovmstrio.core.tensor import RawTensor
from ovmstrio.wire.http.answers import error_answer

if TYPE_CHECKING:
    from ovmstrio.core.request import InferResponse
    from ovmstrio.core.tensor import Tensor

__all__ = ["error_event", "event", "generate_document"]

_CONTROL: Final = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
"""Characters that no text has; bytes that hold one are numbers."""


def generate_document(response: InferResponse) -> dict[str, Any]:
    """Give what a response says: each output under its name, as one value or a flat list of them.

    Raises:
        InvalidRequest: JSON cannot carry an output.
    """
    document: dict[str, Any] = {"model_name": response.model_name, "model_version": response.model_version}
    if response.id:
        document["id"] = response.id
    if response.parameters:
        document["parameters"] = response.parameters
    for tensor in response.outputs:
        document[tensor.name] = _value(tensor)
    return document


def event(response: InferResponse) -> bytes:
    """Write a response as an event.

    Raises:
        InvalidRequest: JSON cannot carry an output.
    """
    return b"data: %b\n\n" % orjson.dumps(generate_document(response), option=orjson.OPT_SERIALIZE_NUMPY)


def error_event(error: Exception) -> bytes:
    """Write an error as the last event."""
    return b"event: error\ndata: %b\n\n" % error_answer(error).content


def _value(tensor: Tensor | RawTensor) -> Any:
    if isinstance(tensor, RawTensor):
        text = _text(tensor)
        if text is not None:
            return text
    values = json_values(tensor)
    if len(values) != 1:
        return values
    return values[0].item() if isinstance(values, np.ndarray) else values[0]


def _text(tensor: RawTensor) -> str | None:
    """Read the bytes that Python nodes give for a text, which have the datatype ``UINT8`` unless they say another."""
    if tensor.datatype == "BYTES" and not len(tensor.data):
        return ""
    if tensor.datatype != "UINT8" or len(tensor.shape) != 1:
        return None
    try:
        text = bytes(tensor.data).decode()
    except UnicodeDecodeError:
        return None
    return None if _CONTROL.search(text) else text
