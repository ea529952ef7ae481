"""Shared libraries with the interface of custom nodes: each build of a path once in the process, never unloaded.

A library that is built again is opened beside the builds before it, which whatever was opened from them goes on with.
None is unloaded, because threads that nobody waits for any more, or that a library started itself, may still be in its
code, and so may destructors that it left to threads.
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
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from struct import Struct
from typing import IO, Any, Final, NamedTuple, cast
from uuid import uuid4

import structlog

from ovmstrio.core.errors import ConfigError, CustomNodeFailure, Problem
from ovmstrio.pipelines.native.abi import FUNCTIONS
from ovmstrio.util.regular_files import open_regular

__all__ = [
    "TEXTS",
    "NativeLibrary",
    "NodeIdentity",
    "UndefinedSymbol",
    "is_cut",
    "load_library",
    "private_copy",
    "remove_leftovers",
    "undefined_symbol",
    "why_not_loadable",
]

# ----------------------------------------------------------------------
# What can be wrong with a native custom node, in the words that users of such libraries look for
# ----------------------------------------------------------------------

TEXTS: Final[Mapping[str, str]] = {
    "NODE_LIBRARY_LOAD_FAILED_OPEN": "Custom node library cannot be opened",
    "NODE_LIBRARY_LOAD_FAILED_SYM": "Custom node library lacks a function of the interface",
    "NODE_LIBRARY_INITIALIZE_FAILED": "Custom node failed to initialize",
    "NODE_LIBRARY_METADATA_FAILED": "Custom node failed to describe its inputs and outputs",
    "NODE_LIBRARY_EXECUTION_FAILED": "Custom node failed during execution",
    "NODE_LIBRARY_OUTPUTS_CORRUPTED": "Custom node library has returned a corrupted handle",
    "NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT": "Custom node library has returned a corrupted count",
    "NODE_LIBRARY_OUTPUT_MISSING_NAME": "Custom node gave an output without a name",
    "NODE_LIBRARY_INVALID_PRECISION": "Custom node gave an output of an unknown precision",
    "NODE_LIBRARY_INVALID_SHAPE": "Custom node gave an output of an impossible shape",
    "NODE_LIBRARY_INVALID_CONTENT_SIZE": "Custom node gave an output of another size than its shape needs",
}
"""What each code means; the code itself ends the message."""


class NodeIdentity:
    """The name of a node and the library it comes from, for messages."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path

    def __str__(self) -> str:
        return f"node {self.name!r} of {self.path}"

    def failed(self, code: str, detail: str) -> CustomNodeFailure:
        """Make the error of a call."""
        return CustomNodeFailure(f"{TEXTS[code]}; {self}: {detail} ({code})")

    def unusable(self, code: str, detail: str, suggestion: str = "") -> ConfigError:
        """Make the error of opening the node."""
        return ConfigError([self.problem(code, detail, suggestion=suggestion)])

    def problem(self, code: str, detail: str, *, line: int | None = None, suggestion: str = "") -> Problem:
        """Note something wrong with the library."""
        message = f"{TEXTS[code]}; node {self.name!r}: {detail} ({code})"
        return Problem(message, str(self.path), line, suggestion=suggestion)


# ----------------------------------------------------------------------
# What can be seen of a shared library in its file, without opening it
# ----------------------------------------------------------------------

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
        with open_regular(path) as file:
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


_SEGMENTS: Final = Struct("<32xQ14xHH")
_SEGMENT: Final = Struct("<I4xQ16xQ")
_LOADED: Final = 1


def is_cut(path: Path) -> bool:
    """Tell whether the end is missing of what is mapped into memory, so that opening it ends the process; blocking.

    Raises:
        OSError: the file cannot be read.
    """
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


# ----------------------------------------------------------------------
# A symbol that a library uses and nobody has: what it is called in its source, and the file it is likely to be in
# ----------------------------------------------------------------------

_UNDEFINED: Final = re.compile(r"^(?P<library>.*?): (?:undefined symbol|symbol lookup error): (?P<symbol>[^\s,]+)")
_SOURCES: Final = frozenset({".c", ".cc", ".cpp", ".cxx", ".h", ".hh", ".hpp", ".inl"})
_MOST_FILES: Final = 200
_LONGEST_FILE: Final = 2**20
_DEMANGLE_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class UndefinedSymbol:
    """A symbol, readable; the library that lacks it; where sources beside that define it, or else use it."""

    name: str
    library: Path
    defined: str = ""
    used: str = ""

    @property
    def detail(self) -> str:
        """What is wrong, and where."""
        where = f", which is defined in {self.defined}" if self.defined else f" ({self.used})" if self.used else ""
        return f"{self.library.name} uses {self.name}{where}, and nothing that it is linked with has that"

    @property
    def suggestion(self) -> str:
        """The way out."""
        missing = Path(self.defined.rpartition(":")[0]).name if self.defined else "the file or library that has it"
        return f"link it with {missing}; `ovms custom-node build DIRECTORY` takes all sources of a directory"


def undefined_symbol(message: str, path: Path) -> UndefinedSymbol | None:
    """Read the dynamic loader's message on a library; None if it speaks of something else.  Blocking."""
    found = _UNDEFINED.search(message)
    if found is None:
        return None
    name = _demangled(found["symbol"])
    # It may be one of those that the library needs in turn.
    library = Path(found["library"]) if found["library"] else path
    return UndefinedSymbol(name, library, *_find(_plain(name), library.parent))


def _demangled(symbol: str) -> str:
    tool = shutil.which("c++filt")
    if tool is None or not symbol.startswith("_Z"):
        return symbol
    try:
        told = subprocess.run(  # noqa: S603 - found on the path, and given an argument only
            [tool, symbol], capture_output=True, text=True, check=False, timeout=_DEMANGLE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return symbol
    return told.stdout.strip() or symbol


def _plain(name: str) -> str:
    """Give the word that a source has of a name: ``method`` of ``space::Class<int>::method(int) const``."""
    before_arguments = re.sub(r"<[^<>]*>", "", name.partition("(")[0])
    return before_arguments.rpartition("::")[2].rpartition(" ")[2]


def _find(word: str, folder: Path) -> tuple[str, str]:
    """Look for a function in the sources of a folder: where it is defined, and where it is used, both may be empty."""
    if not re.fullmatch(r"\w+", word):
        return "", ""
    definition = re.compile(rf"\b{word}\s*\([^;{{}}]*\)[\w\s]*\{{")
    use = re.compile(rf"\b{word}\b")
    used = ""
    for file, text in _sources(folder):
        defined = definition.search(text)
        if defined is not None:
            return _place(file, text, defined.start()), used
        seen = None if used else use.search(text)
        if seen is not None:
            used = _place(file, text, seen.start())
    return "", used


def _sources(folder: Path) -> Iterator[tuple[Path, str]]:
    try:
        files = sorted(islice((each for each in folder.iterdir() if each.suffix in _SOURCES), _MOST_FILES))
    except OSError:
        return
    for file in files:
        try:
            with TextIOWrapper(open_regular(file), encoding="utf-8", errors="replace") as opened:
                yield file, opened.read(_LONGEST_FILE)
        except OSError:
            continue


def _place(file: Path, text: str, position: int) -> str:
    return f"{file}:{text.count(chr(10), 0, position) + 1}"


# ----------------------------------------------------------------------
# A copy of a library that a process opens in its place, so that the file itself may be written again at any time
# ----------------------------------------------------------------------

_SUFFIX: Final = ".ovmstrio-copy"
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_LONGEST_NAME: Final = 200
"""Of the part of a copy's name that is the library's; what a debugger or ``/proc/PID/maps`` shows of it."""


@contextmanager
def private_copy(path: Path) -> Iterator[Path]:
    """Give a copy of a file, in the same folder, that is deleted at the end of the block; blocking.

    Copies that processes left there when they crashed are deleted first.

    Raises:
        OSError: the file cannot be read, or its folder not be written.
    """
    remove_leftovers(path)
    with open_regular(path) as source:
        while True:
            copy = path.with_name(f".{path.name[:_LONGEST_NAME]}.{uuid4().hex}{_SUFFIX}")
            with os.fdopen(os.open(copy, _NEW, 0o600), "wb") as target:
                try:
                    if not _is_kept(target):
                        continue
                    shutil.copyfileobj(source, target)
                    target.flush()
                    yield copy
                finally:
                    copy.unlink(missing_ok=True)
            return


def remove_leftovers(path: Path) -> None:
    """Delete copies beside a file that no process is about to open; blocking.

    A process holds a lock on its copy, which the system takes from it when it dies.  What cannot be deleted stays.
    """
    with suppress(OSError):
        for leftover in path.resolve().parent.glob(f".*{_SUFFIX}"):
            with suppress(OSError), leftover.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink()


def _is_kept(target: IO[bytes]) -> bool:
    """Lock a new file, and tell whether nobody took it for a leftover before."""
    try:
        fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(target.fileno()).st_nlink > 0


# ----------------------------------------------------------------------
# Shared libraries with the interface of custom nodes: each build of a path once in the process, never unloaded
# ----------------------------------------------------------------------

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
