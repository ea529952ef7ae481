"""What Ops infer with: a Paddle model in this process, or a model or pipeline of another server."""
