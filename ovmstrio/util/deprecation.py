"""Deprecated import paths, which work for one more release."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any


def forward_names(module: str, target: str, names: Collection[str]) -> Callable[[str], Any]:
    """Return a module's ``__getattr__`` that takes names from another module and warns of the move.

    Args:
        module: the module that had the names.
        target: the module that has them now; imported at the first access.
        names: the names that are forwarded; every other name is an ``AttributeError``.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        message = f"{module}.{name} has moved to {target}; the old name works in this release only"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(import_module(target), name)

    return get
