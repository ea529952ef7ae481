"""Model client of Python handlers."""

from ovmstrio.handlers.cortex.clients import ModelClient

__all__ = ["ModelClient"]
