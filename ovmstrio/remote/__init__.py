"""Models of other servers: targets, health, retries and the gRPC and REST clients."""
