"""A handler: a gRPC service of its own, which streams prime numbers."""
