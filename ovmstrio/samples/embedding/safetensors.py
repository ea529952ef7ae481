"""Reader of safetensors files: a JSON header with names, types, shapes and offsets, then the data."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from ovmstrio import Array

__all__ = ["read"]

_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "I64": np.dtype("<i8")}


def read(path: Path) -> Mapping[str, Array]:
    """Memory-map every tensor of the file.

    Raises:
        ValueError: the file is not in this format, or contains an unsupported type.
    """
    content = np.memmap(path, np.uint8, "r")
    if len(content) < 8:
        raise ValueError(f"{path} is too short for a safetensors file")
    (length,) = struct.unpack("<Q", content[:8].tobytes())
    start = 8 + length
    header = json.loads(content[8:start].tobytes())
    header.pop("__metadata__", None)
    tensors: dict[str, Array] = {}
    for name, about in header.items():
        if about["dtype"] not in _DTYPES:
            raise ValueError(f"{path}: {name} is of type {about['dtype']}, expected one of {sorted(_DTYPES)}")
        begin, end = about["data_offsets"]
        dtype = _DTYPES[about["dtype"]]
        numbers = np.frombuffer(content, dtype, (end - begin) // dtype.itemsize, start + begin)
        tensors[name] = numbers.reshape(about["shape"])
    return tensors
