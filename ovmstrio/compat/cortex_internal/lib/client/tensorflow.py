"""Model client of TensorFlow handlers."""

from ovmstrio.handlers.cortex.clients import TensorFlowClient

__all__ = ["TensorFlowClient"]
