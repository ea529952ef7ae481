"""Pipelines of Ops in Python: what a service's script imports."""

from ovmstrio.runtimes.ops import (
    ChannelData,
    ChannelDataType,
    CustomException,
    CustomExceptionCode,
    Op,
    PipelineRequest,
    PipelineResponse,
    PipelineTensor,
    ProductErrCode,
    RequestOp,
    ResponseOp,
    WebService,
)
from ovmstrio.runtimes.ops.observing.analyst import Analyst, OpAnalyst

__all__ = [
    "Analyst",
    "ChannelData",
    "ChannelDataType",
    "CustomException",
    "CustomExceptionCode",
    "Op",
    "OpAnalyst",
    "PipelineRequest",
    "PipelineResponse",
    "PipelineTensor",
    "ProductErrCode",
    "RequestOp",
    "ResponseOp",
    "WebService",
]
