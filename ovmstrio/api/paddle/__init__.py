"""Paddle Serving's pipelines over HTTP and gRPC."""
