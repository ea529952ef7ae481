"""Text in pictures, read by a pipeline of Ops."""
