"""Loading of the class ``Handler`` from a project's Python file or pickle; blocking."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.handlers.config.project_spec import ProjectSpec
from ovmstrio.isolation.handler_imports import HandlerPackage
from ovmstrio.util.extras import Extra, install_command
from ovmstrio.util.regular_files import open_regular

VERBS: Final = ("post", "get", "put", "patch", "delete")
"""HTTP verbs that handlers can implement, as ``handle_post`` and so on."""
HTTP_ARGUMENTS: Final = frozenset({"payload", "headers", "query_params"})
GRPC_ARGUMENTS: Final = frozenset({"payload", "context"})


@dataclass(frozen=True, slots=True)
class HandlerMethod:
    """Method of a handler instance.

    Attributes:
        arguments: names of the available arguments that the method accepts.
        is_generator: whether a call only creates a generator, asynchronous or not.
        is_batched: whether the method takes lists of arguments and returns a list of results.
    """

    name: str
    call: Callable[..., Any]
    arguments: frozenset[str]
    is_generator: bool = False
    is_batched: bool = False

    @classmethod
    def of(cls, instance: Any, name: str, available: frozenset[str], *, is_batched: bool = False) -> HandlerMethod:
        """Create the description of a method, whose signature has been checked."""
        method = getattr(instance, name)
        arguments = available & set(inspect.signature(method).parameters)
        is_generator = inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)
        return cls(name, method, arguments, is_generator, is_batched)


CLASS: Final = "Handler"
_PICKLE: Final = ".pickle"


def import_folders(project: ProjectSpec) -> list[Path]:
    """Return the folders that the handler can import from, in order of precedence."""
    folders = (project.directory, project.python_path, project.handler_path.parent)
    return list(dict.fromkeys(folders))


@contextmanager
def on_sys_path(folders: list[Path]) -> Iterator[None]:
    """Append folders to ``sys.path`` during the block, for lookups by module name such as pickle's."""
    added = [str(folder) for folder in folders if str(folder) not in sys.path]
    sys.path.extend(added)
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)


def load_handler_class(package: HandlerPackage, file: Path) -> type[Any]:
    """Load the class from a Python file or a pickle; raise ConfigError if it does not exist."""
    if not file.is_file():
        raise _problem(file, "the handler's file does not exist", hint="correct path in the project's file")
    cls = _unpickle(file) if file.suffix == _PICKLE else _find_class(vars(package.load(file)))
    if not inspect.isclass(cls):
        found = "" if cls is None else type(cls).__name__
        hint = f"define or import class {CLASS} in it"
        raise _problem(
            file, f"the handler's file has no class {CLASS}", expected=f"a class {CLASS}", found=found, hint=hint
        )
    return cls


def _find_class(members: dict[str, Any]) -> Any:
    named = members.get(CLASS)
    if inspect.isclass(named):
        return named
    defined = (each for each in members.values() if inspect.isclass(each) and each.__name__ == CLASS)
    return next(defined, named)


def _unpickle(file: Path) -> Any:
    try:
        import dill  # noqa: PLC0415 - only such handlers need it
    except ImportError:
        raise _problem(
            file,
            "a pickled handler needs dill, which is not installed",
            hint=f"{install_command(Extra.HANDLERS)}, or write {CLASS}.py",
        ) from None
    with open_regular(file) as opened:
        return dill.load(opened)  # noqa: S301 - trusted code, like the Python file


def _problem(file: Path, message: str, *, expected: str = "", found: str = "", hint: str = "") -> ConfigError:
    return ConfigError([Problem(message, file=os.fspath(file), expected=expected, found=found, suggestion=hint)])
