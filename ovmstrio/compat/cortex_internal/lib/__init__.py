"""Logger, exceptions and model clients of handlers."""
