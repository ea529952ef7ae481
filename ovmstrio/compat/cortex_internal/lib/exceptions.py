"""Exceptions of handlers."""

from ovmstrio.handlers.cortex.exceptions import CortexException, UserException, UserRuntimeException

__all__ = ["CortexException", "UserException", "UserRuntimeException"]
