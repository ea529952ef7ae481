"""Shapes whose sizes may be open: whether one can be another, and what two have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.core.tensor import Dim

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["common_shape", "fits", "shown_dims"]


def common_dim(one: Dim, other: Dim) -> Dim | None:
    """Give the sizes that both have; None if there are none."""
    highs = [dim.high for dim in (one, other) if dim.high != -1]
    common = Dim(max(one.low, other.low), min(highs, default=-1))
    return common if common.high == -1 or common.low <= common.high else None


def common_shape(one: Sequence[Dim], other: Sequence[Dim]) -> tuple[Dim, ...] | None:
    """Give the shapes that fit both; None if there are none."""
    if len(one) != len(other):
        return None
    dims = [common_dim(a, b) for a, b in zip(one, other, strict=True)]
    found = tuple(dim for dim in dims if dim is not None)
    return found if len(found) == len(dims) else None


def fits(sent: Sequence[Dim], taken: Sequence[Dim]) -> bool:
    """Tell whether what is sent may be what is taken; if not every size of it is, a request may still fail."""
    return common_shape(sent, taken) is not None


def shown_dims(dims: Sequence[Dim]) -> str:
    """Print a shape."""
    return f"[{','.join(map(str, dims))}]"
