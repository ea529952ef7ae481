"""Timelines of requests, under the name ``TimeProfiler``."""

from ovmstrio.ops.observing.observing import Timelines as TimeProfiler

__all__ = ["TimeProfiler"]
