"""What a custom node of a pipeline is written with: types for its functions in Python, the interface for C."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ovmstrio import pipelines

__all__ = ["Array", "Infos", "Params", "include_folder"]

Array = np.ndarray[Any, Any]
"""An input, which is read-only, or an output."""

Params = Mapping[str, str]
"""The texts of the node's ``params`` in the configuration."""

Infos = Mapping[str, tuple[Any, Sequence[int]]]
"""What ``get_inputs_info`` and ``get_outputs_info`` give: element type and shape by name; a size of -1 means any."""


def include_folder() -> Path:
    """Return the folder of ``custom_node_interface.h``, for compilers and build systems."""
    return Path(pipelines.__file__).parent / "include"
