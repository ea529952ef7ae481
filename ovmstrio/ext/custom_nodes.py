"""Custom node API: types for Python functions, and the C interface."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ovmstrio import pipelines

__all__ = ["Array", "Infos", "Params", "include_folder"]

Array = np.ndarray[Any, Any]
"""Read-only input, or output."""

Params = Mapping[str, str]
"""The node's ``params`` in the configuration."""

Infos = Mapping[str, tuple[Any, Sequence[int]]]
"""Result of ``get_inputs_info`` and ``get_outputs_info``: element type and shape by name; a size of -1 is dynamic."""


def include_folder() -> Path:
    """Return the folder of ``custom_node_interface.h``, for compilers and build systems."""
    return Path(pipelines.__file__).parent / "include"
