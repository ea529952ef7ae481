"""Which versions of what a project asks for can be in one image with the server."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["DEFAULT_PYTHON", "python_for", "system_for", "tensorflow_for"]

DEFAULT_PYTHON: Final = "3.11"
_VERSION: Final = re.compile(r"(\d+)\.(\d+)(\.\d+)?")
_PYTHONS: Final = ((3, 11), (3, 14))
_FIRST_TENSORFLOW: Final = (2, 12)
"""The first one that there is for a Python of the server's."""
_SYSTEMS: Final = (((11, 7), "22.04"), ((11, 0), "20.04"))
"""Ubuntus by the first CUDA that has an image with them."""


def python_for(version: str) -> str | None:
    """Give the Python of an image, or None if the server does not run on it."""
    numbers = _numbers(version)
    return version if numbers is not None and _PYTHONS[0] <= numbers < _PYTHONS[1] else None


def tensorflow_for(version: str) -> str | None:
    """Give the TensorFlow package of an image, or None if there is none for the server's Pythons."""
    numbers = _numbers(version)
    return version if numbers is not None and numbers >= _FIRST_TENSORFLOW else None


def system_for(cuda: str) -> str | None:
    """Give the Ubuntu of a CUDA image, or None if its C library is too old for OpenVINO."""
    numbers = _numbers(cuda)
    if numbers is None:
        return None
    return next((system for first, system in _SYSTEMS if numbers >= first), None)


def _numbers(version: str) -> tuple[int, int] | None:
    match = _VERSION.fullmatch(version)
    return None if match is None else (int(match[1]), int(match[2]))
