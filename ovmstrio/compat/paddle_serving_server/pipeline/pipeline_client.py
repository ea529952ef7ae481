"""Client of pipelines."""

from ovmstrio.client.pipeline import PipelineClient
from ovmstrio.client.pipeline import PredictFuture as PipelinePredictFuture

__all__ = ["PipelineClient", "PipelinePredictFuture"]
