"""Observation of Op pipelines: metrics, timelines, log files and executor hooks."""
