"""The TensorFlow Serving API over gRPC: ``PredictionService`` and ``ModelService``."""

from ovmstrio.api.tensorflow.grpc.model_service import ModelService
from ovmstrio.api.tensorflow.grpc.prediction_service import PredictionService

__all__ = ["ModelService", "PredictionService"]
