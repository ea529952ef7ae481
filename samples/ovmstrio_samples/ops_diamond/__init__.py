"""Two models side by side in a pipeline of Ops, with automatic batching."""
