"""OpenVINO models as servables, and the one validation of requests."""

from ovmstrio.runtimes.models.load_model import load_model

__all__ = ["load_model"]
