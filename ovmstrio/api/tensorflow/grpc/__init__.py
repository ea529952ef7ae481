"""The TensorFlow Serving API over gRPC: ``PredictionService`` and ``ModelService``."""

from ovmstrio.api.tensorflow.grpc.prediction_service import ModelService, PredictionService

__all__ = ["ModelService", "PredictionService"]
