"""Handlers as gRPC services: compiled ``.proto`` files, calls and the context object of user code."""
