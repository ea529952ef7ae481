"""Op classes."""

from __future__ import annotations

from typing import Any

from ovmstrio.ext.ops import Op, RequestOp, ResponseOp

__all__ = ["Op", "RequestOp", "ResponseOp", "VirtualOp"]


class VirtualOp(Op):
    """Not supported: an Op may take outputs of any other Op."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("VirtualOp is not supported: set input_ops of the consuming Op")
