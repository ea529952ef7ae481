"""ctypes declarations of OVMS's custom-node interface: structs, precisions and functions."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, Structure, c_char_p, c_int, c_uint64, c_void_p
from typing import Any, ClassVar, Final

import numpy as np

from ovmstrio.core.tensor import BY_NAME, Datatype


class NodeTensor(Structure):
    """``struct CustomNodeTensor``; pointers are plain addresses, because the library owns the memory."""

    _fields_: ClassVar = [
        ("name", c_char_p),
        ("data", c_void_p),
        ("data_bytes", c_uint64),
        ("dims", c_void_p),
        ("dims_count", c_uint64),
        ("precision", c_int),
    ]


class NodeTensorInfo(Structure):
    """``struct CustomNodeTensorInfo``."""

    _fields_: ClassVar = [
        ("name", c_char_p),
        ("dims", c_void_p),
        ("dims_count", c_uint64),
        ("precision", c_int),
    ]


class NodeParam(Structure):
    """``struct CustomNodeParam``."""

    _fields_: ClassVar = [("key", c_char_p), ("value", c_char_p)]


DATATYPES: Final[Mapping[int, Datatype]] = {
    1: BY_NAME["FP32"],
    2: BY_NAME["FP16"],
    3: BY_NAME["UINT8"],
    4: BY_NAME["INT8"],
    5: BY_NAME["INT16"],
    6: BY_NAME["UINT16"],
    7: BY_NAME["INT32"],
    8: BY_NAME["FP64"],
    9: BY_NAME["INT64"],
}
"""Datatypes by their number in the interface; 0 is unspecified."""

PRECISIONS: Final[Mapping[np.dtype[Any], int]] = {row.numpy: number for number, row in DATATYPES.items()}

_PARAMS: Final = (POINTER(NodeParam), c_int)
_INFO: Final = (POINTER(c_void_p), POINTER(c_int), *_PARAMS, c_void_p)

FUNCTIONS: Final[Mapping[str, tuple[Any, ...]]] = {
    "initialize": (POINTER(c_void_p), *_PARAMS),
    "deinitialize": (c_void_p,),
    "execute": (POINTER(NodeTensor), c_int, POINTER(c_void_p), POINTER(c_int), *_PARAMS, c_void_p),
    "getInputsInfo": _INFO,
    "getOutputsInfo": _INFO,
    "release": (c_void_p, c_void_p),
}
"""Required functions with their argument types; all return int."""

assert ctypes.sizeof(c_void_p) == ctypes.sizeof(c_uint64), (  # noqa: S101 - depends on the machine, not on inputs
    "custom nodes require a 64-bit system"
)
