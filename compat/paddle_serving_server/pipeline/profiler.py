"""What measures a pipeline's requests; scripts rarely touch it."""

from ovmstrio.ops.observing.tracer import Timelines as TimeProfiler

__all__ = ["TimeProfiler"]
