"""Answers: what a ResponseOp makes of the last Op's output, and whatever it makes as a value."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from ovmstrio.runtimes.ops.codes import CustomExceptionCode, product_number
from ovmstrio.runtimes.ops.tensors import LOD_SUFFIX, from_array
from ovmstrio.runtimes.ops.values import ChannelData, ChannelDataType, PipelineResponse

__all__ = ["as_response", "holds_arrays", "pack"]


def holds_arrays(output: Mapping[str, Any]) -> bool:
    """Tell whether every value is an array, or a list of texts that is not empty."""
    for value in output.values():
        if not isinstance(value, np.ndarray) and not (isinstance(value, list) and _are_texts(value)):
            return False
    return True


def _are_texts(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(one, str) for one in values)


def pack(data: ChannelData, *, as_tensors: bool = False) -> PipelineResponse:
    """Make the answer: arrays as numpy prints them in full, texts as they are, or arrays as tensors."""
    response = PipelineResponse(err_no=data.error_code, err_msg=data.error_info)
    if data.prod_error_code is not None:
        response.err_no, response.err_msg = product_number(data.prod_error_code), data.prod_error_info
    if response.err_no:
        return response
    output = data.parse()
    if data.datatype == ChannelDataType.CHANNEL_NPDATA.value:
        if as_tensors:
            _pack_tensors(response, output, stays_array=data.keeps_arrays)
        else:
            _pack_printed(response, output)
    else:
        _pack_texts(response, output)
    return response


def _pack_printed(response: PipelineResponse, output: Mapping[str, Any]) -> None:
    with np.printoptions(threshold=sys.maxsize, legacy="1.25"):
        for name, value in output.items():
            response.keys.append(name)
            response.values.append(repr(value))


def _pack_tensors(response: PipelineResponse, output: Mapping[str, Any], *, stays_array: bool) -> None:
    for name, value in output.items():
        owner = name.removesuffix(LOD_SUFFIX)
        if owner == name or owner not in output:
            response.tensors.append(from_array(name, value, output.get(name + LOD_SUFFIX), stays_array=stays_array))


def _pack_texts(response: PipelineResponse, output: Mapping[str, Any]) -> None:
    for name, value in output.items():
        if not isinstance(value, str):
            response.err_no = CustomExceptionCode.TYPE_ERROR.value
            response.err_msg = f"@DAGExecutor fetch var type must be str({type(value)})."
            return
        response.keys.append(name)
        response.values.append(value)


def as_response(packed: Any) -> PipelineResponse:
    """Give what a pack hook made as a value; it may be anything with the fields of the message.

    Raises:
        AttributeError, TypeError, ValueError: it is nothing of the kind.
    """
    if isinstance(packed, PipelineResponse):
        response = packed
    else:
        response = PipelineResponse(packed.err_no, packed.err_msg, list(packed.key), list(packed.value))
        response.tensors = list(packed.tensors)
    response.err_no = product_number(response.err_no)
    for text in (response.err_msg, *response.keys, *response.values):
        if not isinstance(text, str):
            raise TypeError(f"keys, values and err_msg of an answer must be str, got {type(text).__name__}")
    return response
