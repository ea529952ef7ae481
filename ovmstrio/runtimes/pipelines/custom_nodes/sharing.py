"""Arrays that several nodes see."""

from __future__ import annotations

from collections.abc import Mapping

from ovmstrio.core.tensor import Array

__all__ = ["read_only"]


def read_only(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Give views of arrays that cannot be written through."""
    views = {name: array.view() for name, array in arrays.items()}
    for view in views.values():
        view.flags.writeable = False
    return views
