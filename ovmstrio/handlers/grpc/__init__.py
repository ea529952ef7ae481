"""Handlers as gRPC services: compiled ``.proto`` files, calls and the user's context object."""
