"""Nucleus projects: Handler classes behind HTTP verbs or the user's own gRPC service."""
