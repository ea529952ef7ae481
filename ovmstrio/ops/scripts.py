"""Scripts of services: run as Python would run them, as far as the service that they run.

A script that is a program of its own is the main module of its process, and again of each of its worker processes.
One beside other services is the main module only while it runs, and has modules of its own.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.isolation.importing import HandlerPackage
from ovmstrio.ops.config_file import CONFIG_VARIABLE
from ovmstrio.ops.web_service import set_service_runner
from ovmstrio.util.regular_files import read_regular_bytes
from ovmstrio.util.truncation import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ovmstrio.ops.web_service import WebService

__all__ = ["MAIN", "find_service", "run_as_main", "run_beside_others"]

MAIN: Final = "__main__"
_process: Final = Lock()
"""Held by the one script that has the process's arguments, environment and main module for a while."""


class _Found(BaseException):
    """Ends a script at the service that it would run."""

    def __init__(self, service: WebService) -> None:
        super().__init__()
        self.service = service


def run_as_main(script: Path) -> None:
    """Run a script as the main module, which it stays.

    Raises:
        BaseException: whatever the script raises.
    """
    _run(script, ModuleType(MAIN))


def _run(script: Path, module: ModuleType) -> None:
    code = compile(read_regular_bytes(script), str(script), "exec")
    module.__file__ = str(script)
    sys.modules[MAIN] = module
    exec(code, module.__dict__)  # noqa: S102 - this is what the user wants to be run


def find_service(script: Path, name: str) -> WebService:
    """Run a script as the main module up to where it would serve; for a process that is the script's own.

    Raises:
        ConfigError: it runs no service of that name.
        BaseException: whatever the script raises before.
    """
    found, _ = _until_found(name, lambda: run_as_main(script))
    if found is None:
        message = f"{script} runs no service named {name!r} in a worker process, although it does in the server"
        raise ConfigError([Problem(message, suggestion="let it run the same service whenever it is run")])
    return found


def run_beside_others(script: Path, name: str, config: Path | None) -> tuple[WebService, HandlerPackage]:
    """Run a script in a process that serves other things, too, up to where it would serve; blocking.

    It sees itself as ``__main__`` with no arguments, and the modules beside it as its own; when this returns, nothing
    of the process has changed.

    Args:
        script: the file.
        name: of the service that is wanted, if the script runs several.
        config: what ``ArgsParser`` takes for the configuration.

    Returns:
        The service, and its modules, which the caller has to unload.

    Raises:
        ConfigError: the script cannot be run, or runs no such service.
    """
    package = HandlerPackage(script.parent)
    module = ModuleType(MAIN)
    module.__dict__["__builtins__"] = package.builtins_of()
    try:
        with _process, _lent(script, config):
            return _chosen(script, name, *_until_found(name, lambda: _run(script, module))), package
    except BaseException as error:
        package.unload()
        if isinstance(error, ConfigError) or not isinstance(error, Exception | SystemExit):
            raise
        raise _failed(script, error) from error


def _until_found(name: str, run: Callable[[], None]) -> tuple[WebService | None, list[WebService]]:
    """Run a script until it runs a service of a name; gives that service, and those before it."""
    others: list[WebService] = []

    def note(service: WebService) -> None:
        if service.name == name:
            raise _Found(service)
        others.append(service)

    before = set_service_runner(note)
    try:
        run()
    except _Found as found:
        return found.service, others
    except SystemExit:
        if not others:
            raise
    finally:
        set_service_runner(before)
    return None, others


def _chosen(script: Path, name: str, found: WebService | None, others: list[WebService]) -> WebService:
    if found is not None:
        return found
    if len(others) == 1:
        return others[0]
    names = ", ".join(repr(one.name) for one in others)
    problem = Problem(
        f"the script runs {'no service' if not others else f'several services, none of which is {name!r}'}",
        str(script),
        expected="a WebService that is prepared, and whose run_service is called" if not others else repr(name),
        found=names or "none",
    )
    raise ConfigError([problem])


def _failed(script: Path, error: BaseException) -> ConfigError:
    """Say where a script raised, as far as the line is its own."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(script):
            line = trace.tb_lineno
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.filename == str(script):
        line = error.lineno
    return ConfigError([Problem(f"the script raised {type(error).__name__}: {text_of(error)}", str(script), line)])


@contextmanager
def _lent(script: Path, config: Path | None) -> Iterator[None]:
    """Let a script have what there is once in a process, and put it back."""
    main, arguments, before = sys.modules[MAIN], sys.argv, os.environ.get(CONFIG_VARIABLE)
    sys.argv = [str(script)]
    _set_config(None if config is None else str(config))
    try:
        yield
    finally:
        sys.modules[MAIN], sys.argv = main, arguments
        _set_config(before)


def _set_config(value: Any) -> None:
    os.environ.pop(CONFIG_VARIABLE, None)
    if value is not None:
        os.environ[CONFIG_VARIABLE] = value
