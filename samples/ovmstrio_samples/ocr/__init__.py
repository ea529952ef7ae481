"""Text in pictures, read by three models."""
