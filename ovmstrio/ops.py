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

__all__ = [
    "ChannelData",
    "ChannelDataType",
    "CustomException",
    "CustomExceptionCode",
    "Op",
    "PipelineRequest",
    "PipelineResponse",
    "PipelineTensor",
    "ProductErrCode",
    "RequestOp",
    "ResponseOp",
    "WebService",
]
