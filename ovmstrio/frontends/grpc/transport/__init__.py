"""gRPC over HTTP/2 on trio, without any knowledge of inference."""
