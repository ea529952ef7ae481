"""A gRPC server on trio: HTTP/2 connections, streams, flow control and limits."""
