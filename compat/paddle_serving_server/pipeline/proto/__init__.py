"""The messages and the service of pipelines."""
