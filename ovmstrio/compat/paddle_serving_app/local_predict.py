"""``LocalPredictor``, run by OpenVINO."""

from ovmstrio.ops.predictor.local_model import LocalPredictor

__all__ = ["LocalPredictor"]
