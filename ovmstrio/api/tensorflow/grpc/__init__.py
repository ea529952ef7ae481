"""TensorFlow Serving's protocol over gRPC."""
