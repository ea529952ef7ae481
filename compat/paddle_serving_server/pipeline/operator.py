"""The classes of Ops."""

from __future__ import annotations

from typing import Any

from ovmstrio.ext.ops import Op, RequestOp, ResponseOp

__all__ = ["Op", "RequestOp", "ResponseOp", "VirtualOp"]


class VirtualOp(Op):
    """Has no use here: an output goes straight to every Op that takes it, however far away."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("VirtualOp is not needed: give the Op that takes an output all its input_ops")
