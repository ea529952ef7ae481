"""The gRPC service of Paddle Serving's pipelines."""

from ovmstrio.api.paddle.grpc.pipeline_service import PipelineService

__all__ = ["PipelineService"]
