"""The TensorFlow Serving API."""
