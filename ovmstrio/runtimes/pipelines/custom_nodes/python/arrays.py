"""The arrays that come out of ``execute`` of a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ovmstrio.core.tensor import Array
from ovmstrio.runtimes.pipelines.custom_nodes.python.infos import DATATYPE_OF
from ovmstrio.runtimes.pipelines.custom_nodes.sharing import read_only

__all__ = ["WrongOutputsError", "read_outputs"]


class WrongOutputsError(Exception):
    """What ``execute`` gave cannot be used; ``code`` says how."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def read_outputs(given: Any) -> dict[str, Array]:
    """Check what ``execute`` gave, and give arrays that are C-contiguous and in this machine's byte order.

    Raises:
        WrongOutputsError: it is no dict of arrays with element types of tensors.
    """
    if not isinstance(given, Mapping) or not given:
        found = "an empty dict" if isinstance(given, Mapping) else type(given).__name__
        code = (
            "NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT" if isinstance(given, Mapping) else "NODE_LIBRARY_OUTPUTS_CORRUPTED"
        )
        raise WrongOutputsError(code, f"execute must return a dict with an array for each output, not {found}")
    # The user may keep an array, or give it twice, so that nobody may take it for his own.
    return read_only({_name(name): _array(name, value) for name, value in given.items()})


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        text = f"execute returned an output without a name: the key is {name!r}"
        raise WrongOutputsError("NODE_LIBRARY_OUTPUT_MISSING_NAME", text)
    return name


def _array(name: str, value: Any) -> Array:
    if not isinstance(value, np.ndarray | np.generic):
        text = f"output {name!r} must be an array of numpy's, not {type(value).__name__}; make it with np.asarray"
        raise WrongOutputsError("NODE_LIBRARY_OUTPUTS_CORRUPTED", text)
    array = np.asarray(value)
    dtype = array.dtype.newbyteorder("<")
    if dtype not in DATATYPE_OF:
        text = f"output {name!r} has dtype {array.dtype}, which no tensor has; texts travel as uint8 of two dimensions"
        raise WrongOutputsError("NODE_LIBRARY_INVALID_PRECISION", text)
    return np.asarray(array, dtype, order="C")
