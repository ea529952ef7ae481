"""Sample ops_diamond: two models in parallel in a pipeline of Ops, with automatic batching."""
