"""``Analyst``, the reader of pipeline timelines."""

from ovmstrio.ops.observing.analyst import Analyst, OpAnalyst

__all__ = ["Analyst", "OpAnalyst"]
