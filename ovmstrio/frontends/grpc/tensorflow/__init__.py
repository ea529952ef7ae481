"""The TensorFlow Serving API over gRPC: ``PredictionService`` and ``ModelService``."""

from ovmstrio.frontends.grpc.tensorflow.model_service import ModelService
from ovmstrio.frontends.grpc.tensorflow.prediction_service import PredictionService

__all__ = ["ModelService", "PredictionService"]
