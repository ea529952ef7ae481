"""Unary gRPC calls on trio: a synchronous state machine of HTTP/2, its shell, and KServe's messages."""
