"""OpenVINO models as servables, and the one validation of requests."""

from ovmstrio.models.loading import load_model

__all__ = ["load_model"]
