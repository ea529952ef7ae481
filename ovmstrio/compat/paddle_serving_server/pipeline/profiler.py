"""Timelines of requests, under the name ``TimeProfiler``."""

from ovmstrio.ops.observing.observers import Timelines as TimeProfiler

__all__ = ["TimeProfiler"]
