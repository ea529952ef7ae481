"""``LocalPredictor``, run by OpenVINO."""

from ovmstrio.ops.predictor.local_predict import LocalPredictor

__all__ = ["LocalPredictor"]
