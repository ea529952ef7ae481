"""Compilation of a project's ``.proto`` and import of the generated modules."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, Final

import structlog
import trio
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.isolation.handler_imports import HandlerPackage
from ovmstrio.isolation.user_code import describe_error
from ovmstrio.util.extras import Extra, install_command
from ovmstrio.util.regular_files import read_regular_bytes

log = structlog.get_logger(__name__)

GOOGLE_FILES: Final = "google/protobuf/"
"""Folder of the files that protobuf includes, whose modules are already installed."""
_DESCRIPTORS: Final = "descriptors.binpb"
_MESSAGE: Final = re.compile(r"(?P<file>[^:]+\.proto):(?:(?P<line>\d+):\d+:)? ?(?P<warning>warning: )?(?P<text>.+)")


@dataclass(frozen=True, slots=True)
class CompiledProto:
    """Output of the protobuf compiler.

    Attributes:
        name: name of the file in ``files``.
        files: descriptors of the file and its imports, by name.
        folder: contains the generated Python modules.
    """

    source: Path
    name: str
    files: dict[str, FileDescriptorProto]
    folder: Path


def module_name(file: str) -> str:
    """Return the name of the Python module generated from a file, such as ``iris_pb2``."""
    return file.removesuffix(".proto").replace("-", "_").replace("/", ".") + "_pb2"


async def compile_proto(source: Path, roots: Sequence[Path], folder: Path) -> CompiledProto:
    """Compile a ``.proto`` below one of the ``roots``, and its imports, to Python modules in ``folder``.

    Raises:
        ConfigError: with the compiler's messages if compilation fails; or the compiler is not installed.

    Cancellation: kills the compiler.
    """
    if importlib.util.find_spec("grpc_tools") is None:
        message, hint = "the protobuf compiler is not installed", install_command(Extra.HANDLERS)
        suggestion = f"{hint}, or install the package grpcio-tools"
        raise ConfigError([Problem(message, file=str(source), path="protobuf_path", suggestion=suggestion)])
    if not await trio.Path(source).is_file():
        raise ConfigError([Problem("the protobuf file does not exist", file=str(source), path="protobuf_path")])
    includes = [f"-I{root}" for root in roots]
    descriptors = folder / _DESCRIPTORS
    await _run(source, [*includes, "--include_imports", f"--descriptor_set_out={descriptors}", str(source)])
    files = {file.name: file for file in FileDescriptorSet.FromString(read_regular_bytes(descriptors)).file}
    # The compiler lists imports first and the file itself last.
    name = list(files)[-1]
    project_files = [each for each in files if not each.startswith(GOOGLE_FILES)]
    await _run(source, [*includes, f"--python_out={folder}", f"--grpc_python_out={folder}", *project_files])
    _create_packages(folder)
    return CompiledProto(source, name, files, folder)


async def _run(source: Path, arguments: Sequence[str]) -> None:
    done = await trio.run_process(
        # -P: modules in the working directory must not shadow installed ones.
        [sys.executable, "-P", "-m", "grpc_tools.protoc", *arguments],
        check=False,
        stdout=subprocess.DEVNULL,
        capture_stderr=True,
        # Signals of the terminal are for the server.
        process_group=0,
    )
    lines = done.stderr.decode("utf-8", "replace").splitlines()
    problems = [_problem_in(line, source) for line in lines if line.strip()]
    for problem in problems:
        if problem.severity == "warning":
            log.warning("protobuf compiler warning", problem=str(problem))
    if done.returncode:
        errors = [problem for problem in problems if problem.severity == "error"]
        raise ConfigError(errors or [Problem(f"the compiler failed with code {done.returncode}", file=str(source))])


def _problem_in(line: str, source: Path) -> Problem:
    found = _MESSAGE.fullmatch(line.strip())
    if found is None:
        return Problem(line.strip(), file=str(source))
    # The compiler names a file relative to its root.
    file = str(source) if Path(found["file"]).name == source.name else found["file"]
    number = None if found["line"] is None else int(found["line"])
    return Problem(found["text"], file=file, line=number, severity="warning" if found["warning"] else "error")


def _create_packages(folder: Path) -> None:
    """Create ``__init__.py`` files, so that generated modules take precedence over installed packages.

    ``google`` stays a namespace package, since it also contains protobuf's modules.
    """
    for each in folder.rglob("*"):
        if each.is_dir() and each.relative_to(folder).parts[0] != "google":
            (each / "__init__.py").touch()


# Services

_POOL_IMPORT: Final = "from google.protobuf import descriptor_pool as _descriptor_pool\n"
_PRIVATE_POOL: Final = "ovmstrio_private_pool"


@contextmanager
def imported_modules(proto: CompiledProto) -> Iterator[dict[str, ModuleType]]:
    """Import the generated modules, by the names that handlers use; blocking.

    The main file is available with and without its folder. Raises ConfigError if the generated code cannot be imported.
    """
    package = HandlerPackage(proto.folder)
    try:
        yield _load(proto, package)
    finally:
        package.unload()


def _load(proto: CompiledProto, package: HandlerPackage) -> dict[str, ModuleType]:
    try:
        try:
            modules = _import_all(proto, package)
        except TypeError as error:
            log.info("private descriptor pool used", file=str(proto.source), reason=str(error))
            _use_private_pool(proto, package)
            modules = _import_all(proto, package)
    except Exception as error:
        text = f"the generated code cannot be imported: {describe_error(error)}"
        raise ConfigError([Problem(text, file=str(proto.source), path="protobuf_path")]) from error
    main = module_name(proto.name)
    short = main.rpartition(".")[2]
    return {short: modules[main], f"{short}_grpc": modules[f"{main}_grpc"], **modules}


def _import_all(proto: CompiledProto, package: HandlerPackage) -> dict[str, ModuleType]:
    modules: dict[str, ModuleType] = {}
    for file in _project_files(proto.files):
        for name in (module_name(file), f"{module_name(file)}_grpc"):
            modules[name] = importlib.import_module(f"{package.name}.{name}")
    return modules


def _project_files(files: Mapping[str, FileDescriptorProto]) -> list[str]:
    return [name for name in files if not name.startswith(GOOGLE_FILES)]


def _use_private_pool(proto: CompiledProto, package: HandlerPackage) -> None:
    pool = DescriptorPool()
    for name, file in proto.files.items():
        if name.startswith(GOOGLE_FILES):
            pool.Add(file)
    holder: Any = ModuleType(_PRIVATE_POOL)
    holder.Default = lambda: pool
    sys.modules[f"{package.name}.{_PRIVATE_POOL}"] = holder
    for name in _project_files(proto.files):
        path = proto.folder / (module_name(name).replace(".", "/") + ".py")
        path.write_text(path.read_text().replace(_POOL_IMPORT, f"import {_PRIVATE_POOL} as _descriptor_pool\n"))


@dataclass(frozen=True, slots=True)
class Rpc:
    """RPC of a service, with generated message classes."""

    name: str
    path: str
    request_class: type[Any]
    reply_class: type[Any]
    client_streaming: bool
    server_streaming: bool


@dataclass(frozen=True, slots=True)
class UserService:
    """gRPC service with its full name."""

    name: str
    rpcs: tuple[Rpc, ...]


@dataclass(frozen=True, slots=True)
class UserProto:
    """Compiled and imported ``.proto``.

    Attributes:
        module: generated module with the messages, passed to the handler's constructor.
        modules: generated modules by import name (``iris_pb2``, ``iris_pb2_grpc``).
        services: in the order of the file.
        files: descriptors of the file and its imports by name, imports first.
    """

    source: Path
    module: ModuleType
    modules: Mapping[str, ModuleType]
    services: tuple[UserService, ...]
    files: Mapping[str, FileDescriptorProto]

    @property
    def rpcs(self) -> Iterator[Rpc]:
        """All RPCs of all services."""
        return (rpc for service in self.services for rpc in service.rpcs)


@asynccontextmanager
async def open_proto(source: Path, directory: Path) -> AsyncIterator[UserProto]:
    """Compile and import a project's ``.proto``, and keep the modules during the block.

    Both paths are absolute. Imports are resolved in ``directory`` and in the folder of the file.

    Raises:
        ConfigError: compilation or import fails, the file declares no service, or two services share a method name.

    Cancellation: kills the compiler; a started import is awaited.
    """
    roots = [directory, source.parent] if source.is_relative_to(directory) else [source.parent]
    with TemporaryDirectory(prefix="ovmstrio-proto-") as folder:
        compiled = await compile_proto(source, list(dict.fromkeys(roots)), Path(folder))
        modules_of = imported_modules(compiled)
        modules = await trio.to_thread.run_sync(modules_of.__enter__)
        try:
            module = modules[module_name(compiled.name)]
            yield UserProto(source, module, modules, _services_of(module, source), compiled.files)
        finally:
            modules_of.__exit__(None, None, None)


def _services_of(module: Any, source: Path) -> tuple[UserService, ...]:
    services = tuple(_service(each) for each in module.DESCRIPTOR.services_by_name.values())
    problems = _problems_of(services, source)
    if problems:
        raise ConfigError(problems)
    return services


def _service(descriptor: Any) -> UserService:
    return UserService(
        descriptor.full_name,
        tuple(
            Rpc(
                method.name,
                f"/{descriptor.full_name}/{method.name}",
                GetMessageClass(method.input_type),
                GetMessageClass(method.output_type),
                method.client_streaming,
                method.server_streaming,
            )
            for method in descriptor.methods
        ),
    )


def _problems_of(services: tuple[UserService, ...], source: Path) -> list[Problem]:
    if not services:
        return [Problem("declares no service", file=str(source), path="protobuf_path", expected="at least one service")]
    declared: dict[str, str] = {}
    problems: list[Problem] = []
    for service in services:
        for rpc in service.rpcs:
            first = declared.setdefault(rpc.name, service.name)
            if first != service.name:
                text = f"{first} and {service.name} both have a method {rpc.name}, but a Handler can have only one"
                problems.append(Problem(text, file=str(source), suggestion="rename one of the two"))
    return problems
