"""KServe v2 over gRPC and REST: inference, streams, repository, shared memory and statistics."""
