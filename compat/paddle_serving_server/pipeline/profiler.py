"""Timelines of requests, under the name ``TimeProfiler``."""

from ovmstrio.ops.observing.tracer import Timelines as TimeProfiler

__all__ = ["TimeProfiler"]
