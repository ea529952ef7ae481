"""Pipelines: models and custom nodes joined to a task graph, with demultiplexing and gathering."""
