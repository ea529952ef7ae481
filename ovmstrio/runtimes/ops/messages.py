"""The protobuf messages of pipelines to and from the values of ``ovmstrio.runtimes.ops.values``."""

from __future__ import annotations

from typing import Any, Final

import structlog

from ovmstrio.core.texts import text_of
from ovmstrio.protocol.pipeline_messages import RESPONSE
from ovmstrio.runtimes.ops.values import CustomExceptionCode, PipelineRequest, PipelineResponse, PipelineTensor

__all__ = ["add_tensor", "from_message", "tensor_from_message", "to_message"]

log = structlog.get_logger(__name__)

LISTS: Final = (
    "int64_data",
    "float_data",
    "int_data",
    "float64_data",
    "uint32_data",
    "bool_data",
    "str_data",
    "shape",
    "lod",
)
"""Repeated fields of a tensor that have a place in its value; complex numbers have none."""

SCALARS: Final = ("byte_data", "elem_type", "name")


def from_message(message: Any) -> PipelineRequest:
    """Read a request."""
    return PipelineRequest(
        keys=list(message.key),
        values=list(message.value),
        tensors=[tensor_from_message(tensor) for tensor in message.tensors],
        name=message.name,
        method=message.method,
        logid=message.logid,
        clientip=message.clientip,
    )


def tensor_from_message(message: Any) -> PipelineTensor:
    """Read a tensor."""
    fields: dict[str, Any] = {name: list(getattr(message, name)) for name in LISTS}
    fields |= {name: getattr(message, name) for name in SCALARS}
    return PipelineTensor(**fields)


def to_message(response: PipelineResponse) -> Any:
    """Write an answer; one that a service filled with what it cannot hold becomes error 8000."""
    try:
        message = RESPONSE(err_no=response.err_no, err_msg=response.err_msg, key=response.keys, value=response.values)
        for tensor in response.tensors:
            add_tensor(message, tensor)
    except (TypeError, ValueError) as error:
        log.error("answer cannot be packed", reason=text_of(error))  # noqa: TRY400 - the caller is told
        return RESPONSE(
            err_no=CustomExceptionCode.RPC_PACKAGE_ERROR.value, err_msg=f"rpc package error: {text_of(error)}"
        )
    return message


def add_tensor(message: Any, tensor: PipelineTensor) -> None:
    """Write a tensor behind those of a request or an answer.

    Raises:
        TypeError: a field cannot hold what it is to hold.
        ValueError: as above, for numbers that are too large.
    """
    added = message.tensors.add()
    for name in SCALARS:
        setattr(added, name, getattr(tensor, name))
    for name in LISTS:
        getattr(added, name).extend(getattr(tensor, name))
