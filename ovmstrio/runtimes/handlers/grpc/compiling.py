"""Run the protobuf compiler over a project's ``.proto``.

The compiler comes with the package ``grpcio-tools``, which only projects with a ``protobuf_path`` need.  It runs as a
process of its own, because it writes what it has to say past Python to the standard error stream.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
import trio
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.extras import Extra, way_to_install
from ovmstrio.util.regular_files import read_regular_bytes

__all__ = ["GOOGLE_FILES", "CompiledProto", "compile_proto", "module_name"]

log = structlog.get_logger(__name__)

GOOGLE_FILES: Final = "google/protobuf/"
"""Where the files lie that come with protobuf itself, ready to be imported."""
_DESCRIPTORS: Final = "descriptors.binpb"
_MESSAGE: Final = re.compile(r"(?P<file>[^:]+\.proto):(?:(?P<line>\d+):\d+:)? ?(?P<warning>warning: )?(?P<text>.+)")


@dataclass(frozen=True, slots=True)
class CompiledProto:
    """What the compiler made.

    Attributes:
        source: the file that was compiled.
        name: the name of that file among ``files``.
        files: the descriptors of the file and all that it imports, by name.
        folder: where the generated Python modules lie.
    """

    source: Path
    name: str
    files: dict[str, FileDescriptorProto]
    folder: Path


def module_name(file: str) -> str:
    """Give the name of the Python module that the compiler makes of a file, such as ``iris_pb2``."""
    return file.removesuffix(".proto").replace("-", "_").replace("/", ".") + "_pb2"


async def compile_proto(source: Path, roots: Sequence[Path], folder: Path) -> CompiledProto:
    """Compile a file, and those of the project that it imports, to Python modules in ``folder``.

    Args:
        source: the ``.proto``; it lies below one of the roots.
        roots: the folders that imports are relative to.
        folder: where to write; nothing is written elsewhere.

    Raises:
        ConfigError: the file cannot be compiled, with the compiler's own messages, or there is no compiler.

    Ownership: the process of the compiler.
    Cancellation: kills the compiler.
    """
    if importlib.util.find_spec("grpc_tools") is None:
        raise ConfigError([_no_compiler(source)])
    if not await trio.Path(source).is_file():
        raise ConfigError([Problem("the protobuf file does not exist", file=str(source), path="protobuf_path")])
    includes = [f"-I{root}" for root in roots]
    descriptors = folder / _DESCRIPTORS
    await _run(source, [*includes, "--include_imports", f"--descriptor_set_out={descriptors}", str(source)])
    files = {file.name: file for file in FileDescriptorSet.FromString(read_regular_bytes(descriptors)).file}
    # The file itself is last, behind all that it imports.
    name = list(files)[-1]
    own = [each for each in files if not each.startswith(GOOGLE_FILES)]
    await _run(source, [*includes, f"--python_out={folder}", f"--grpc_python_out={folder}", *own])
    _make_packages(folder)
    return CompiledProto(source, name, files, folder)


async def _run(source: Path, arguments: Sequence[str]) -> None:
    done = await trio.run_process(
        # Without -P, modules of the working directory, which may be the project's, would come before all others.
        [sys.executable, "-P", "-m", "grpc_tools.protoc", *arguments],
        check=False,
        stdout=subprocess.DEVNULL,
        capture_stderr=True,
    )
    problems = _problems_in(done.stderr.decode("utf-8", "replace"), source)
    for problem in problems:
        if problem.severity == "warning":
            log.warning("the protobuf compiler warns", problem=str(problem))
    if done.returncode:
        errors = [problem for problem in problems if problem.severity == "error"]
        raise ConfigError(errors or [Problem(f"the compiler failed with code {done.returncode}", file=str(source))])


def _problems_in(output: str, source: Path) -> list[Problem]:
    return [_problem_in(line, source) for line in output.splitlines() if line.strip()]


def _problem_in(line: str, source: Path) -> Problem:
    found = _MESSAGE.fullmatch(line.strip())
    if found is None:
        return Problem(line.strip(), file=str(source))
    # The compiler names a file as those do who import it.
    file = str(source) if Path(found["file"]).name == source.name else found["file"]
    number = None if found["line"] is None else int(found["line"])
    return Problem(found["text"], file=file, line=number, severity="warning" if found["warning"] else "error")


def _no_compiler(source: Path) -> Problem:
    return Problem(
        "the protobuf compiler is not installed",
        file=str(source),
        path="protobuf_path",
        suggestion=f"{way_to_install(Extra.HANDLERS)}, or install the package grpcio-tools",
    )


def _make_packages(folder: Path) -> None:
    """Turn the folders of generated modules into packages, so that they come before any that is installed.

    Only ``google`` stays open, because the modules of protobuf itself are there.
    """
    for each in folder.rglob("*"):
        if each.is_dir() and each.relative_to(folder).parts[0] != "google":
            (each / "__init__.py").touch()
