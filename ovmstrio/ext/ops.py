"""Pipelines of Ops in Python: what a service's script imports."""

from ovmstrio.runtimes.ops.observing.analyst import Analyst, OpAnalyst
from ovmstrio.runtimes.ops.op import Op, RequestOp, ResponseOp
from ovmstrio.runtimes.ops.values import (
    ChannelData,
    ChannelDataType,
    CustomException,
    CustomExceptionCode,
    PipelineRequest,
    PipelineResponse,
    PipelineTensor,
    ProductErrCode,
)
from ovmstrio.runtimes.ops.web_service import WebService

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
