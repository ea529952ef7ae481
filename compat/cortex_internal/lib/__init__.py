"""The logger, the exceptions and the model clients of handlers."""
