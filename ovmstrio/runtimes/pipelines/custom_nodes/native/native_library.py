"""Shared libraries with the interface of custom nodes: each build of a path once in the process, never unloaded.

A library that is built again is opened beside the builds before it, which whatever was opened from them goes on with.
None is unloaded, because threads that nobody waits for any more, or that a library started itself, may still be in its
code, and so may destructors that it left to threads.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import structlog

from ovmstrio.runtimes.pipelines.custom_nodes.native.abi import FUNCTIONS
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_failures import NodeIdentity
from ovmstrio.runtimes.pipelines.custom_nodes.native.private_copy import private_copy
from ovmstrio.runtimes.pipelines.custom_nodes.native.shared_objects import is_cut, why_not_loadable
from ovmstrio.runtimes.pipelines.custom_nodes.native.undefined_symbols import undefined_symbol

__all__ = ["NativeLibrary", "load_library"]

_CUT: Final = "its end is missing, as it is while the file is being written"
_WRITTEN: Final = "it is being written; it is opened once that is done"
_OVERWRITTEN: Final = (
    "the file that this server has open was overwritten, and its folder cannot be written, where a copy would be "
    "opened; restart the server, or write the library beside it and rename that"
)
_REBUILD: Final = 'build it against custom_node_interface.h (`ovms custom-node build`), in C++ as extern "C"'

log = structlog.get_logger(__name__)


class NativeLibrary:
    """The six functions of one build of a library, each of which lets other threads of Python run while it does.

    Attributes:
        symbols: the library itself, for what is not of the interface.

    Raises:
        AttributeError: it lacks some of them.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        missing = [symbol for symbol in FUNCTIONS if not hasattr(library, symbol)]
        if missing:
            raise AttributeError(f"{', '.join(missing)} missing")
        functions: Mapping[str, Callable[..., int]] = {symbol: _prepared(library, symbol) for symbol in FUNCTIONS}
        self.symbols = library
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
    """Give the library of a node as its file is now; blocking, and whatever it does when it is loaded runs here.

    Raises:
        ConfigError: it cannot be loaded (``NODE_LIBRARY_LOAD_FAILED_OPEN``), or a function of the interface is missing
            (``NODE_LIBRARY_LOAD_FAILED_SYM``).
    """
    path = identity.path.resolve()
    try:
        return NativeLibrary(_LIBRARIES.open(path))
    except OSError as error:
        missing = undefined_symbol(str(error), path)
        if missing is not None:
            raise identity.unusable("NODE_LIBRARY_LOAD_FAILED_OPEN", missing.detail, missing.suggestion) from error
        detail = why_not_loadable(path) or str(error)
        raise identity.unusable("NODE_LIBRARY_LOAD_FAILED_OPEN", detail) from error
    except AttributeError as error:
        raise identity.unusable("NODE_LIBRARY_LOAD_FAILED_SYM", str(error), _REBUILD) from error


class _Build(NamedTuple):
    """A file as it was at one time; with any other value it is another build."""

    device: int
    inode: int
    size: int
    mtime_ns: int


def _build_at(path: Path) -> _Build:
    stat = path.stat()
    return _Build(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


class _Libraries:
    """What this process has opened; one is opened at a time, as the dynamic loader has it, too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[Path, tuple[_Build, ctypes.CDLL]] = {}
        self._uncopied: dict[tuple[int, ...], _Build] = {}
        self._spellings: Counter[Path] = Counter()

    def open(self, path: Path) -> ctypes.CDLL:
        """Give a library as its file is now, opened unless it was before.

        Raises:
            OSError: it cannot be opened.
        """
        with self._lock:
            build = _build_at(path)
            known, library = self._newest.get(path, (None, None))
            if library is None or known != build:
                library = self._open(path, build)
                self._newest[path] = build, library
                if known is not None:
                    log.info("custom nodes have a new build of a library", library=str(path))
            return library

    def _open(self, path: Path, build: _Build) -> ctypes.CDLL:
        try:
            with private_copy(path) as copy:
                return _opened(str(copy), path, expected=build)
        except _CannotBeOpened:
            raise
        except OSError as error:
            log.debug("library of custom nodes is opened without a copy", library=str(path), why=str(error))
        return self._open_file(path, build)

    def _open_file(self, path: Path, build: _Build) -> ctypes.CDLL:
        """Open a library itself, because its folder cannot be written."""
        file = build[:2]
        if self._uncopied.get(file, build) != build:
            raise _CannotBeOpened(_OVERWRITTEN)
        # The dynamic loader compares paths as they are written, and gives what it has of one whatever lies there now.
        library = _opened(f"{path.parent}/{'./' * self._spellings[path]}{path.name}", path, expected=build)
        self._uncopied[file] = build
        self._spellings[path] += 1
        return library


_LIBRARIES: Final = _Libraries()


class _CannotBeOpened(OSError):
    """What keeps a file from being opened, in words that name the user's path."""


def _opened(place: str, path: Path, *, expected: _Build) -> ctypes.CDLL:
    """Open what lies at a place, which is a path's build if that one is still the expected one."""
    if _build_at(path) != expected:
        raise _CannotBeOpened(_WRITTEN)
    if is_cut(Path(place)):
        raise _CannotBeOpened(_CUT)
    try:
        # A symbol that is looked up when it is first called, and not found then, ends the process.
        return ctypes.CDLL(place, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        raise _CannotBeOpened(str(error).replace(place, str(path))) from None
