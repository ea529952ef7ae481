"""Shared libraries with the interface of custom nodes: one in the process for each path, never unloaded.

A library is not unloaded because threads that nobody waits for any more may still be in its code.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from struct import Struct
from typing import Any, Final, cast

from ovmstrio.runtimes.pipelines.custom_nodes.native.abi import FUNCTIONS
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_failures import NodeIdentity
from ovmstrio.runtimes.pipelines.custom_nodes.native.undefined_symbols import undefined_symbol

__all__ = ["NativeLibrary", "load_library", "why_not_loadable"]

_REBUILD: Final = 'build it against custom_node_interface.h (`ovms custom-node build`), in C++ as extern "C"'


class NativeLibrary:
    """The six functions of one library, each of which lets other threads of Python run while it does."""

    def __init__(self, library: ctypes.CDLL) -> None:
        functions: Mapping[str, Callable[..., int]] = {symbol: _prepared(library, symbol) for symbol in FUNCTIONS}
        self.initialize = functions["initialize"]
        self.deinitialize = functions["deinitialize"]
        self.execute = functions["execute"]
        self.get_inputs_info = functions["getInputsInfo"]
        self.get_outputs_info = functions["getOutputsInfo"]
        self.release = functions["release"]


def _prepared(library: ctypes.CDLL, symbol: str) -> Callable[..., int]:
    function: Any = library[symbol]
    function.argtypes = FUNCTIONS[symbol]
    function.restype = ctypes.c_int
    return cast("Callable[..., int]", function)


def load_library(identity: NodeIdentity) -> NativeLibrary:
    """Give the library of a node; blocking, and whatever the library does when it is loaded runs here.

    Raises:
        ConfigError: it cannot be loaded (``NODE_LIBRARY_LOAD_FAILED_OPEN``), or a function of the interface is missing
            (``NODE_LIBRARY_LOAD_FAILED_SYM``).
    """
    path = identity.path.resolve()
    try:
        return _load(path)
    except OSError as error:
        missing = undefined_symbol(str(error), path)
        if missing is not None:
            raise identity.unusable("NODE_LIBRARY_LOAD_FAILED_OPEN", missing.detail, missing.suggestion) from error
        detail = why_not_loadable(path) or str(error)
        raise identity.unusable("NODE_LIBRARY_LOAD_FAILED_OPEN", detail) from error
    except AttributeError as error:
        raise identity.unusable("NODE_LIBRARY_LOAD_FAILED_SYM", str(error), _REBUILD) from error


@functools.cache
def _load(path: Path) -> NativeLibrary:
    # A symbol that is looked up when it is first called, and not found then, ends the process.
    library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    missing = [symbol for symbol in FUNCTIONS if not hasattr(library, symbol)]
    if missing:
        raise AttributeError(f"{', '.join(missing)} missing")
    return NativeLibrary(library)


_HEADER: Final = Struct("<4sBB10xHH")
_CLASS_64: Final = 2
_LITTLE_ENDIAN: Final = 1
_SHARED_OBJECT: Final = 3
_MACHINES: Final = {
    3: "x86",
    8: "mips",
    21: "ppc64",
    22: "s390x",
    40: "arm",
    62: "x86_64",
    183: "aarch64",
    243: "riscv64",
}


def why_not_loadable(path: Path) -> str:
    """Look at a file and say what keeps it from being loaded, or nothing if that cannot be seen; blocking.

    The dynamic loader's own words mislead for a library of another machine.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER.size)
    except OSError as error:
        return error.strerror or str(error)
    if len(head) < _HEADER.size or not head.startswith(b"\x7fELF"):
        return "it is no shared library (no ELF header)"
    _, word_size, order, kind, machine = _HEADER.unpack(head)
    if order != _LITTLE_ENDIAN or word_size != _CLASS_64:
        return "it is built for another kind of machine (not 64-bit little-endian)"
    built_for = _MACHINES.get(machine, f"machine {machine}")
    if built_for != platform.machine():
        return f"it is built for {built_for}, and this machine is {platform.machine()}"
    return "" if kind == _SHARED_OBJECT else "it is no shared library (link it with -shared)"
