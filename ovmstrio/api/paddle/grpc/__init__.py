"""The gRPC way into Paddle Serving's pipelines."""
