"""Sample ops_regression: a regression with a Paddle model in a pipeline of one Op."""
