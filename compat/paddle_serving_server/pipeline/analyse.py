"""``Analyst``, which reads the timelines that a pipeline has written."""

from ovmstrio.ops.observing.analyst import Analyst, OpAnalyst

__all__ = ["Analyst", "OpAnalyst"]
