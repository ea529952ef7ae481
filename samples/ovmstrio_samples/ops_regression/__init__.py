"""A regression with a Paddle model, served by a pipeline of one Op."""
