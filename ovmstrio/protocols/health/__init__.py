"""gRPC's standard services: health and reflection."""
