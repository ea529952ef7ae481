"""Shared libraries with the interface of custom nodes: one in the process for each path, never unloaded.

A library is not unloaded because threads that nobody waits for any more may still be in its code.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from ovmstrio.runtimes.pipelines.custom_nodes.native.abi import FUNCTIONS
from ovmstrio.runtimes.pipelines.custom_nodes.native.elf import why_not_loadable
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_failures import NodeIdentity

__all__ = ["NativeLibrary", "load_library"]

_REBUILD: Final = 'build it against custom_node_interface.h (`ovms custom-node build`), in C++ as extern "C"'


class NativeLibrary:
    """The six functions of one library, each of which lets other threads of Python run while it does.

    Args:
        library: the library, in which no function is missing.
    """

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
        detail = why_not_loadable(path) or str(error)
        raise identity.unusable("NODE_LIBRARY_LOAD_FAILED_OPEN", detail) from error
    except AttributeError as error:
        raise identity.unusable("NODE_LIBRARY_LOAD_FAILED_SYM", str(error), _REBUILD) from error


@functools.cache
def _load(path: Path) -> NativeLibrary:
    loader = ctypes.CDLL(None)
    loader.dlopen.restype = ctypes.c_void_p
    loader.dlopen.argtypes = (ctypes.c_char_p, ctypes.c_int)
    loader.dlerror.restype = ctypes.c_char_p
    handle = loader.dlopen(os.fsencode(path), os.RTLD_LAZY | os.RTLD_LOCAL)
    if handle is None:
        raise OSError((loader.dlerror() or b"").decode(errors="replace"))
    # Naming the handle keeps ctypes from opening the library itself, which it does with RTLD_NOW.
    library = ctypes.CDLL(str(path), handle=handle)
    missing = [symbol for symbol in FUNCTIONS if not hasattr(library, symbol)]
    if missing:
        raise AttributeError(f"{', '.join(missing)} missing")
    return NativeLibrary(library)
