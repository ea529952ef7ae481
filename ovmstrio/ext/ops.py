"""Op pipeline API, for scripts."""

from ovmstrio.ops.graph import WebService, set_default_runner
from ovmstrio.ops.messages import (
    ChannelData,
    ChannelDataType,
    CustomException,
    CustomExceptionCode,
    PipelineRequest,
    PipelineResponse,
    PipelineTensor,
    ProductErrCode,
)
from ovmstrio.ops.observing.analyst import Analyst, OpAnalyst
from ovmstrio.ops.op import Op, RequestOp, ResponseOp

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


def _run_service(service: WebService) -> None:
    from ovmstrio.workers.run_service import run_script_service  # noqa: PLC0415 - a definition needs no server

    run_script_service(service)


set_default_runner(_run_service)
