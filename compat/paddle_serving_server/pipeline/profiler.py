"""What measures a pipeline's requests; scripts rarely touch it."""

from ovmstrio.runtimes.ops.observing.timeline import Timelines as TimeProfiler

__all__ = ["TimeProfiler"]
