"""Logger that writes one JSON object per line to standard output."""

from ovmstrio.handlers.cortex.log import JsonFormatter, StdoutHandler, configure_logger, logger

__all__ = ["JsonFormatter", "StdoutHandler", "configure_logger", "logger"]
