"""Reader of tensors in a file that torch.save() wrote before PyTorch 1.6, without PyTorch.

Such a file contains five pickles and then the tensor data.  The reader builds only tensors and refuses any other class
or function that the file names, so a file cannot run code.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from ovmstrio import Array

__all__ = ["read"]

_MAGIC: Final = 0x1950A86A20F9469CFC6C
_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {"FloatStorage": np.dtype("<f4"), "LongStorage": np.dtype("<i8")}


@dataclass(slots=True)
class _Storage:
    """Storage whose data follows later in the file."""

    dtype: np.dtype[Any]
    numbers: Array = field(default_factory=lambda: np.empty(0))


@dataclass(frozen=True, slots=True)
class _Tensor:
    """View of a storage; strides are in elements."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def array(self) -> Array:
        """Copy the elements to a new array."""
        numbers = self.storage.numbers
        needed = self.offset + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True)) + 1
        if min(self.stride, default=0) < 0 or needed > len(numbers):
            raise ValueError(f"a tensor reaches to element {needed} of a storage of {len(numbers)}")
        strides = [stride * numbers.itemsize for stride in self.stride]
        return np.lib.stride_tricks.as_strided(numbers[self.offset :], self.size, strides).copy()


def _rebuild_tensor(storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> _Tensor:
    return _Tensor(storage, offset, size, stride)


class _Unpickler(pickle.Unpickler):
    """Unpickler that builds dictionaries and tensors, and refuses everything else."""

    _ALLOWED: Final[Mapping[tuple[str, str], Callable[..., Any]]] = {
        ("collections", "OrderedDict"): OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    }

    def __init__(self, file: io.BufferedReader, storages: dict[str, _Storage]) -> None:
        super().__init__(file)
        self._storages = storages

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return the object of an allowed name."""
        if module_name == "torch" and global_name in _DTYPES:
            return global_name
        try:
            return self._ALLOWED[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"the file asks for {module_name}.{global_name}, which is refused") from None

    def persistent_load(self, pid: Any) -> _Storage:
        """Return a placeholder for the storage of a tensor."""
        _, kind, key, *_ = pid
        return self._storages.setdefault(key, _Storage(_DTYPES[kind]))


def _plain(file: io.BufferedReader) -> Any:
    return _Unpickler(file, {}).load()


def read(path: Path) -> Mapping[str, Array]:
    """Read every tensor of the file.

    Raises:
        ValueError: the file is not in this format.
        pickle.UnpicklingError: the file names a class or function that tensors do not need.
    """
    storages: dict[str, _Storage] = {}
    with path.open("rb") as file:
        if _plain(file) != _MAGIC:
            raise ValueError(f"{path} is not a file of torch.save() from before PyTorch 1.6")
        _plain(file)  # the version of the format
        _plain(file)  # information on the machine that wrote the file
        tensors = _Unpickler(file, storages).load()
        for key in _plain(file):
            (count,) = struct.unpack("<q", file.read(8))
            storage = storages[key]
            storage.numbers = np.frombuffer(file.read(count * storage.dtype.itemsize), storage.dtype)
    return {name: tensor.array() for name, tensor in tensors.items()}
