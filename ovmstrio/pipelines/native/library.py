"""Shared libraries of custom nodes: loading, error messages, and private copies.

The process opens each build of a path once. A rebuilt library is opened in addition to older builds, which keep
serving the nodes that use them. Libraries are never unloaded: abandoned threads, threads of the library or
destructors may still run its code.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import re
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from ctypes import POINTER, Structure, c_char_p, c_int, c_uint64, c_void_p
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from struct import Struct
from typing import IO, Any, ClassVar, Final, NamedTuple, cast
from uuid import uuid4

import numpy as np
import structlog

from ovmstrio.core.errors import ConfigError, CustomNodeFailure, Problem
from ovmstrio.core.tensor import BY_NAME, Datatype
from ovmstrio.util.regular_files import open_regular

# ----------------------------------------------------------------------
# ctypes declarations of OVMS's custom-node interface: structs, precisions and functions
# ----------------------------------------------------------------------


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


# ----------------------------------------------------------------------
# Shared libraries of custom nodes: loading, error messages, and private copies
# ----------------------------------------------------------------------

# Errors

_MESSAGES: Final[Mapping[str, str]] = {
    "NODE_LIBRARY_LOAD_FAILED_OPEN": "Custom node library cannot be opened",
    "NODE_LIBRARY_LOAD_FAILED_SYM": "Custom node library lacks a function of the interface",
    "NODE_LIBRARY_INITIALIZE_FAILED": "Custom node failed to initialize",
    "NODE_LIBRARY_METADATA_FAILED": "Custom node failed to describe its inputs and outputs",
    "NODE_LIBRARY_EXECUTION_FAILED": "Custom node failed during execution",
    "NODE_LIBRARY_OUTPUTS_CORRUPTED": "Custom node library has returned a corrupted handle",
    "NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT": "Custom node library has returned a corrupted count",
    "NODE_LIBRARY_OUTPUT_MISSING_NAME": "Custom node returned an output without a name",
    "NODE_LIBRARY_INVALID_PRECISION": "Custom node returned an output of an unknown precision",
    "NODE_LIBRARY_INVALID_SHAPE": "Custom node returned an output of an invalid shape",
    "NODE_LIBRARY_INVALID_CONTENT_SIZE": "Custom node returned an output whose size does not match its shape",
}
"""Message of each error code; the code is appended to the message."""


class NodeIdentity:
    """Name and library of a node, for messages."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path

    def __str__(self) -> str:
        return f"node {self.name!r} of {self.path}"

    def failed(self, code: str, detail: str) -> CustomNodeFailure:
        """Return the error of a call."""
        return CustomNodeFailure(f"{_MESSAGES[code]}; {self}: {detail} ({code})")

    def unusable(self, code: str, detail: str, suggestion: str = "") -> ConfigError:
        """Return the error of opening the node."""
        return ConfigError([self.problem(code, detail, suggestion=suggestion)])

    def problem(self, code: str, detail: str, *, line: int | None = None, suggestion: str = "") -> Problem:
        """Return a problem of the library."""
        message = f"{_MESSAGES[code]}; node {self.name!r}: {detail} ({code})"
        return Problem(message, str(self.path), line, suggestion=suggestion)


# ELF checks

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


def _unloadable_reason(path: Path) -> str:
    """Return why a file cannot be loaded as a library; empty if the file header shows no reason. Blocks.

    The dynamic loader's messages are misleading for libraries of other machines.
    """
    try:
        with open_regular(path) as file:
            head = file.read(_HEADER.size)
    except OSError as error:
        return error.strerror or str(error)
    if len(head) < _HEADER.size or not head.startswith(b"\x7fELF"):
        return "it is not a shared library (no ELF header)"
    _, word_size, order, kind, machine = _HEADER.unpack(head)
    if order != _LITTLE_ENDIAN or word_size != _CLASS_64:
        return "it is built for another machine type (not 64-bit little-endian)"
    built_for = _MACHINES.get(machine, f"machine {machine}")
    if built_for != platform.machine():
        return f"it is built for {built_for}, but this machine is {platform.machine()}"
    return "" if kind == _SHARED_OBJECT else "it is not a shared library (link it with -shared)"


_SEGMENTS: Final = Struct("<32xQ14xHH")
_SEGMENT: Final = Struct("<I4xQ16xQ")
_LOADED: Final = 1


def _is_truncated(path: Path) -> bool:
    """Return whether the file lacks the end of a loaded segment, so that opening it would crash the process. Blocks."""
    with open_regular(path) as file:
        head = file.read(_SEGMENTS.size)
        if len(head) < _SEGMENTS.size or head[:6] != b"\x7fELF" + bytes([_CLASS_64, _LITTLE_ENDIAN]):
            return False
        start, size, count = _SEGMENTS.unpack(head)
        file.seek(start)
        table = file.read(size * count)
        length = file.seek(0, 2)
    if size < _SEGMENT.size or len(table) < size * count:
        return True
    segments = (_SEGMENT.unpack_from(table, place) for place in range(0, size * count, size))
    return any(kind == _LOADED and begin + stored > length for kind, begin, stored in segments)


# Undefined symbols

_UNDEFINED: Final = re.compile(r"^(?P<library>.*?): (?:undefined symbol|symbol lookup error): (?P<symbol>[^\s,]+)")
_SOURCES: Final = frozenset({".c", ".cc", ".cpp", ".cxx", ".h", ".hh", ".hpp", ".inl"})
_MAX_FILES: Final = 200
_MAX_FILE_CHARACTERS: Final = 2**20
_DEMANGLE_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class _UndefinedSymbol:
    """A demangled symbol, the library that lacks it, and where source files define or use it."""

    name: str
    library: Path
    defined: str = ""
    used: str = ""

    @property
    def detail(self) -> str:
        where = f", which is defined in {self.defined}" if self.defined else f" ({self.used})" if self.used else ""
        return f"{self.library.name} uses {self.name}{where}, but none of its linked libraries defines it"

    @property
    def suggestion(self) -> str:
        missing = Path(self.defined.rpartition(":")[0]).name if self.defined else "the file or library that defines it"
        return f"link it with {missing}; `ovms custom-node build DIRECTORY` compiles all sources of a directory"


def _parse_undefined_symbol(message: str, path: Path) -> _UndefinedSymbol | None:
    """Parse the dynamic loader's message on a library; None if it is about something else. Blocks."""
    found = _UNDEFINED.search(message)
    if found is None:
        return None
    name = _demangled(found["symbol"])
    # The message may be about a dependency of the library.
    library = Path(found["library"]) if found["library"] else path
    return _UndefinedSymbol(name, library, *_find_uses(_identifier(name), library.parent))


def _demangled(symbol: str) -> str:
    tool = shutil.which("c++filt")
    if tool is None or not symbol.startswith("_Z"):
        return symbol
    try:
        done = subprocess.run(  # noqa: S603 - found on the path, and given an argument only
            [tool, symbol], capture_output=True, text=True, check=False, timeout=_DEMANGLE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return symbol
    return done.stdout.strip() or symbol


def _identifier(name: str) -> str:
    """Return the identifier of a demangled name: ``method`` of ``space::Class<int>::method(int) const``."""
    before_arguments = re.sub(r"<[^<>]*>", "", name.partition("(")[0])
    return before_arguments.rpartition("::")[2].rpartition(" ")[2]


def _find_uses(word: str, folder: Path) -> tuple[str, str]:
    """Return where the source files of a folder define a function, and where they use it; empty if unknown."""
    if not re.fullmatch(r"\w+", word):
        return "", ""
    definition = re.compile(rf"\b{word}\s*\([^;{{}}]*\)[\w\s]*\{{")
    use = re.compile(rf"\b{word}\b")
    used = ""
    for file, text in _sources(folder):
        defined = definition.search(text)
        if defined is not None:
            return _source_position(file, text, defined.start()), used
        seen = None if used else use.search(text)
        if seen is not None:
            used = _source_position(file, text, seen.start())
    return "", used


def _sources(folder: Path) -> Iterator[tuple[Path, str]]:
    try:
        files = sorted(islice((each for each in folder.iterdir() if each.suffix in _SOURCES), _MAX_FILES))
    except OSError:
        return
    for file in files:
        try:
            with TextIOWrapper(open_regular(file), encoding="utf-8", errors="replace") as opened:
                yield file, opened.read(_MAX_FILE_CHARACTERS)
        except OSError:
            continue


def _source_position(file: Path, text: str, position: int) -> str:
    return f"{file}:{text.count(chr(10), 0, position) + 1}"


# Private copies

_SUFFIX: Final = ".ovmstrio-copy"
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_MAX_NAME_LENGTH: Final = 200
"""Length limit of the library's name in a copy's name, which debuggers and ``/proc/PID/maps`` show."""


@contextmanager
def private_copy(path: Path) -> Iterator[Path]:
    """Create a copy of a file in the same folder; it is deleted when the block ends. Blocks.

    The process opens the copy, so that the file can be overwritten at any time. Leftover copies of crashed processes
    are deleted first.
    """
    remove_leftovers(path)
    with open_regular(path) as source:
        while True:
            copy = path.with_name(f".{path.name[:_MAX_NAME_LENGTH]}.{uuid4().hex}{_SUFFIX}")
            with os.fdopen(os.open(copy, _NEW, 0o600), "wb") as target:
                try:
                    if not _lock_copy(target):
                        continue
                    shutil.copyfileobj(source, target)
                    target.flush()
                    yield copy
                finally:
                    copy.unlink(missing_ok=True)
            return


def remove_leftovers(path: Path) -> None:
    """Delete leftover copies in a file's folder, as far as possible. Blocks.

    A process holds a lock on its copy, which the kernel releases when the process dies.
    """
    with suppress(OSError):
        for leftover in path.resolve().parent.glob(f".*{_SUFFIX}"):
            with suppress(OSError), leftover.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink()


def _lock_copy(target: IO[bytes]) -> bool:
    """Lock a new file; False if another process has deleted it as a leftover."""
    try:
        fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(target.fileno()).st_nlink > 0


# Libraries

_CUT: Final = "the file is truncated, or still being written"
_WRITTEN: Final = "the file is still being written; the server opens it afterwards"
_OVERWRITTEN: Final = (
    "the open file was overwritten, and its folder is not writable for a copy; restart the server, or write the "
    "library to a new file and rename it"
)
_REBUILD: Final = 'build it against custom_node_interface.h (`ovms custom-node build`), in C++ as extern "C"'

log = structlog.get_logger(__name__)


class NativeLibrary:
    """The six interface functions of one build of a library. Calls release the GIL.

    Attributes:
        symbols: the library itself, for other symbols.

    Raises:
        AttributeError: functions are missing.
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
    """Return a node's library in its current build. Blocks; runs the library's load-time code.

    Raises:
        ConfigError: the library cannot be loaded (``NODE_LIBRARY_LOAD_FAILED_OPEN``), or a function of the interface is
            missing (``NODE_LIBRARY_LOAD_FAILED_SYM``).
    """
    path = identity.path.resolve()
    try:
        return NativeLibrary(_LIBRARIES.open(path))
    except OSError as error:
        missing = _parse_undefined_symbol(str(error), path)
        if missing is not None:
            raise identity.unusable("NODE_LIBRARY_LOAD_FAILED_OPEN", missing.detail, missing.suggestion) from error
        detail = _unloadable_reason(path) or str(error)
        raise identity.unusable("NODE_LIBRARY_LOAD_FAILED_OPEN", detail) from error
    except AttributeError as error:
        raise identity.unusable("NODE_LIBRARY_LOAD_FAILED_SYM", str(error), _REBUILD) from error


class _Build(NamedTuple):
    """Identity of a file's content; any change means another build."""

    device: int
    inode: int
    size: int
    mtime_ns: int


def _build_at(path: Path) -> _Build:
    stat = path.stat()
    return _Build(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


class _Libraries:
    """Libraries opened by this process; one is opened at a time, as the dynamic loader also requires."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[Path, tuple[_Build, ctypes.CDLL]] = {}
        self._uncopied: dict[tuple[int, ...], _Build] = {}
        self._spellings: Counter[Path] = Counter()

    def open(self, path: Path) -> ctypes.CDLL:
        """Return the current build of a library, opened if necessary. Raises OSError if that fails."""
        with self._lock:
            build = _build_at(path)
            known, library = self._newest.get(path, (None, None))
            if library is None or known != build:
                library = self._open(path, build)
                self._newest[path] = build, library
                if known is not None:
                    log.info("custom node library rebuilt", library=str(path))
            return library

    def _open(self, path: Path, build: _Build) -> ctypes.CDLL:
        try:
            with private_copy(path) as copy:
                return _open_checked(str(copy), path, expected=build)
        except _OpenError:
            raise
        except OSError as error:
            log.debug("custom node library opened without copy", library=str(path), why=str(error))
        return self._open_file(path, build)

    def _open_file(self, path: Path, build: _Build) -> ctypes.CDLL:
        """Open a library without a copy, because its folder is not writable."""
        file = build[:2]
        if self._uncopied.get(file, build) != build:
            raise _OpenError(_OVERWRITTEN)
        # The dynamic loader caches by the path's spelling and ignores changes of the file, so vary the spelling.
        library = _open_checked(f"{path.parent}/{'./' * self._spellings[path]}{path.name}", path, expected=build)
        self._uncopied[file] = build
        self._spellings[path] += 1
        return library


_LIBRARIES: Final = _Libraries()


class _OpenError(OSError):
    """Reason why a library cannot be opened, with the user's path."""


def _open_checked(place: str, path: Path, *, expected: _Build) -> ctypes.CDLL:
    """Open the file ``place`` if ``path`` still has the expected build."""
    if _build_at(path) != expected:
        raise _OpenError(_WRITTEN)
    if _is_truncated(Path(place)):
        raise _OpenError(_CUT)
    try:
        # Resolve all symbols now: with lazy binding, a missing symbol would end the process at its first call.
        return ctypes.CDLL(place, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        raise _OpenError(str(error).replace(place, str(path))) from None
