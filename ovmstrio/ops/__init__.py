"""Op pipelines: Paddle Serving ``Op`` graphs, their executor, configuration and protocol adapter."""

from ovmstrio.util.deprecation import forward_names

# Names of the last release; user code now imports them from ``ovmstrio.ext.ops``.
__getattr__ = forward_names(
    __name__,
    "ovmstrio.ext.ops",
    [
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
    ],
)
