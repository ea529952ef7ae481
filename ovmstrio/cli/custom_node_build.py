"""Compilation of custom node libraries with the system's compiler."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from ovmstrio.cli.console import echo
from ovmstrio.ext.custom_nodes import include_folder

_C: Final = ".c"
_CPP: Final = (".cc", ".cpp", ".cxx")
_PREFIX: Final = "libcustom_node_"
_BUILDS_APART: Final = ("-fno-gnu-unique",)
"""Without this flag, GCC shares static variables of templates and inline functions between all builds in a process."""
_HEADER: Final = "custom_node_interface.h"


class BuildError(Exception):
    """The library could not be built; the message has the reason."""


class NothingToBuildError(BuildError):
    """There is no source to compile."""


def build_library(source: Path, output: Path | None, flags: Sequence[str]) -> Path:
    """Compile a file, or all files of a directory, and return the path of the library.

    Args:
        source: the file or directory.
        output: path of the library; by default named after the source and next to it.
        flags: compiler flags, added after all others.

    Raises:
        NothingToBuildError: the source does not exist.
        BuildError: there is no compiler, or compilation failed.
    """
    sources = _sources(source)
    library = output or _default_output(source)
    has_cpp = any(each.suffix in _CPP for each in sources)
    compiler = _compiler(has_cpp=has_cpp)
    made = _temporary_path(library)
    command = [
        *compiler,
        *("-shared", "-fPIC", "-O2", "-Wall", f"-I{include_folder()}"),
        *_flags_of_environment("CXXFLAGS" if has_cpp else "CFLAGS"),
        # Undefined symbols fail the build instead of the load in the server.
        "-Wl,-z,defs",
        *(_BUILDS_APART if has_cpp and _understands(compiler, _BUILDS_APART) else ()),
        *("-o", str(made)),
        *_with_languages(sources, has_cpp=has_cpp),
        *_flags_of_environment("LDFLAGS"),
        *flags,
    ]
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True, errors="replace")  # noqa: S603 - the user's own compiler
    messages = done.stderr.replace(str(made), str(library))
    if done.returncode:
        if made != library:
            made.unlink(missing_ok=True)
        raise BuildError(_explained([str(library) if part == str(made) else part for part in command], messages))
    if messages:
        echo(messages, nl=False, file=sys.stderr)
    if made != library:
        made.replace(library)
    return library


def _temporary_path(library: Path) -> Path:
    """Return the path to build at, so that a server never loads a partial library and keeps the old one on failure."""
    return library if library.exists() and not library.is_file() else library.with_name(f".{library.name}.new")


def _understands(compiler: Sequence[str], flags: Sequence[str]) -> bool:
    tried = subprocess.run(  # noqa: S603 - the user's own compiler
        [*compiler, *flags, "-E", "-x", "c++", os.devnull], check=False, capture_output=True
    )
    return tried.returncode == 0


def _sources(source: Path) -> list[Path]:
    if source.is_dir():
        found = sorted(each for each in source.iterdir() if each.suffix in (_C, *_CPP))
        if not found:
            raise NothingToBuildError(f"{source}: there is no C or C++ file in this directory")
        return found
    if not source.is_file():
        raise NothingToBuildError(
            f"{source}: no such file or directory; expected a C or C++ file, or a directory of them"
        )
    if source.suffix not in (_C, *_CPP):
        raise NothingToBuildError(f"{source}: expected a file that ends with {', '.join((_C, *_CPP))}")
    return [source]


def _default_output(source: Path) -> Path:
    folder, name = (source, source.resolve().name) if source.is_dir() else (source.parent, source.stem)
    return folder / f"{_PREFIX}{name}.so"


def _compiler(*, has_cpp: bool) -> list[str]:
    variable, usual = ("CXX", "c++") if has_cpp else ("CC", "cc")
    command = shlex.split(os.environ.get(variable, "")) or [usual]
    if shutil.which(command[0]) is None:
        package = "g++" if has_cpp else "gcc"
        raise BuildError(f"there is no compiler {command[0]!r}: install {package}, or set {variable} to another one")
    return command


def _flags_of_environment(variable: str) -> list[str]:
    return shlex.split(os.environ.get(variable, ""))


def _with_languages(sources: Iterable[Path], *, has_cpp: bool) -> list[str]:
    """Add the language of each file: a C++ compiler compiles C files as C++."""
    if not has_cpp:
        return [str(each) for each in sources]
    return [part for each in sources for part in ("-x", "c" if each.suffix == _C else "c++", str(each))] + [
        "-x",
        "none",
    ]


def _explained(command: Sequence[str], messages: str) -> str:
    hint = ""
    if f"{_HEADER}: No such file" in messages:
        hint = f'\nhint: include the interface without a path: #include "{_HEADER}"'
    elif "undefined reference to" in messages:
        hint = (
            "\nhint: build the directory with all sources, or link the library that defines the symbol: --flag=-lNAME"
        )
    return f"{shlex.join(command)}\n{messages.rstrip()}{hint}"
