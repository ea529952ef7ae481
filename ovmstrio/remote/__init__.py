"""Remote models: targets, health checks, retries, and gRPC and REST clients."""
