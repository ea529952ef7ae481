"""``LocalServiceHandler``, the local model of an Op."""

from ovmstrio.ops.op import LocalServiceHandler

__all__ = ["LocalServiceHandler"]
