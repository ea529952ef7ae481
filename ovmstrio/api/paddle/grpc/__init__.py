"""The gRPC service of Paddle Serving's pipelines."""

from ovmstrio.api.paddle.grpc.service import PIPELINE_DECODERS, PIPELINE_ENCODERS, PipelineService

__all__ = ["PIPELINE_DECODERS", "PIPELINE_ENCODERS", "PipelineService"]
