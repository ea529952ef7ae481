"""Predictors of Ops: local Paddle models, KServe servers and other pipelines."""
