"""From a project's handler file to its class ``Handler``; blocking, in a thread."""

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
from ovmstrio.isolation.importing import HandlerPackage
from ovmstrio.util.extras import Extra, way_to_install
from ovmstrio.util.regular_files import open_regular

__all__ = [
    "CLASS",
    "GRPC_ARGUMENTS",
    "HTTP_ARGUMENTS",
    "VERBS",
    "HandlerMethod",
    "import_folders",
    "load_handler_class",
    "on_sys_path",
]

VERBS: Final = ("post", "get", "put", "patch", "delete")
"""The verbs of HTTP that a handler may have a method for: ``handle_post`` and so on."""
HTTP_ARGUMENTS: Final = frozenset({"payload", "headers", "query_params"})
GRPC_ARGUMENTS: Final = frozenset({"payload", "context"})


@dataclass(frozen=True, slots=True)
class HandlerMethod:
    """One method, bound to the handler.

    Attributes:
        name: of the method.
        call: the method.
        wanted: the arguments that it asks for, of those that the server has.
        is_generator: whether calling it only makes a generator, asynchronous or not.
        is_batched: whether it gets lists of arguments, and gives a list of results.
    """

    name: str
    call: Callable[..., Any]
    wanted: frozenset[str]
    is_generator: bool = False
    is_batched: bool = False

    @property
    def wants_payload(self) -> bool:
        """Whether the body has to be read for it."""
        return "payload" in self.wanted

    @classmethod
    def of(cls, instance: Any, name: str, known: frozenset[str], *, is_batched: bool = False) -> HandlerMethod:
        """Take a method of an object, whose signature has been checked."""
        method = getattr(instance, name)
        wanted = known & set(inspect.signature(method).parameters)
        is_generator = inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)
        return cls(name, method, frozenset(wanted), is_generator, is_batched)


CLASS: Final = "Handler"
_PICKLE: Final = ".pickle"


def import_folders(project: ProjectSpec) -> list[Path]:
    """Give the folders whose modules the handler can import, the first one first."""
    folders = (project.directory, project.python_path, project.handler_path.parent)
    return list(dict.fromkeys(folders))


@contextmanager
def on_sys_path(folders: list[Path]) -> Iterator[None]:
    """Let everything import from some folders for a while, for what looks modules up by name, as pickles do."""
    added = [str(folder) for folder in folders if str(folder) not in sys.path]
    sys.path.extend(added)
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)


def load_handler_class(package: HandlerPackage, file: Path) -> type[Any]:
    """Load the class from a Python file, or from a pickle of the class.

    Raises:
        ConfigError: there is no such file or class.
        BaseException: whatever the file raises.
    """
    if not file.is_file():
        raise _problem(file, "the handler's file does not exist", fix="correct path in the project's file")
    made = _unpickled(file) if file.suffix == _PICKLE else _found(vars(package.load(file)))
    if not inspect.isclass(made):
        found = "" if made is None else type(made).__name__
        fix = f"define or import class {CLASS} in it"
        raise _problem(file, "the handler's file has no such class", expected=f"a class {CLASS}", found=found, fix=fix)
    return made


def _found(members: dict[str, Any]) -> Any:
    """Find the class by its name in the module, else by the name that it was defined with."""
    named = members.get(CLASS)
    if inspect.isclass(named):
        return named
    defined = (each for each in members.values() if inspect.isclass(each) and each.__name__ == CLASS)
    return next(defined, named)


def _unpickled(file: Path) -> Any:
    try:
        import dill  # noqa: PLC0415 - only such handlers need it
    except ImportError:
        raise _problem(
            file,
            "a pickled handler needs dill, which is not installed",
            fix=f"{way_to_install(Extra.HANDLERS)}, or write {CLASS}.py",
        ) from None
    with open_regular(file) as opened:
        return dill.load(opened)  # noqa: S301 - it is code of the user's, as a Python file would be


def _problem(file: Path, message: str, *, expected: str = "", found: str = "", fix: str = "") -> ConfigError:
    return ConfigError([Problem(message, file=os.fspath(file), expected=expected, found=found, suggestion=fix)])
