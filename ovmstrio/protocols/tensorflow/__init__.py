"""The TensorFlow Serving API over gRPC and REST."""
