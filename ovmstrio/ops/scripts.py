"""Execution of service scripts up to ``run_service``.

A stand-alone script is the main module of its process and of each of its worker processes.  On a shared server a
script is the main module only while it runs, and has private modules.
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
"""Held while a script uses the process's arguments, environment and main module."""


class _ServiceFound(BaseException):
    def __init__(self, service: WebService) -> None:
        super().__init__()
        self.service = service


def run_as_main(script: Path) -> None:
    """Run a script as the main module and keep it in ``sys.modules``; any exception of the script propagates."""
    _run(script, ModuleType(MAIN))


def _run(script: Path, module: ModuleType) -> None:
    code = compile(read_regular_bytes(script), str(script), "exec")
    module.__file__ = str(script)
    sys.modules[MAIN] = module
    exec(code, module.__dict__)  # noqa: S102 - runs the user's script


def find_service(script: Path, name: str) -> WebService:
    """Run a script as the main module up to ``run_service`` and return its service; for a process that owns the script.

    Raises ConfigError if the script runs no service of that name, and any exception of the script.
    """
    found, _ = _run_until_service(name, lambda: run_as_main(script))
    if found is None:
        message = f"{script} runs no service {name!r} in a worker process"
        raise ConfigError([Problem(message, suggestion="run the same service in the server and in worker processes")])
    return found


def run_beside_others(script: Path, name: str, config: Path | None) -> tuple[WebService, HandlerPackage]:
    """Run a script on a shared server up to ``run_service``; return the service, and its modules to unload.

    The script sees itself as ``__main__`` without arguments and its folder's modules as private.  ``config`` is the
    configuration for ``ArgsParser``.  The process state is restored afterwards.  Blocking; raises ConfigError.
    """
    package = HandlerPackage(script.parent)
    module = ModuleType(MAIN)
    module.__dict__["__builtins__"] = package.builtins_of()
    try:
        with _process, _process_state(script, config):
            return _select_service(script, name, *_run_until_service(name, lambda: _run(script, module))), package
    except BaseException as error:
        package.unload()
        if isinstance(error, ConfigError) or not isinstance(error, Exception | SystemExit):
            raise
        raise _script_error(script, error) from error


def _run_until_service(name: str, run: Callable[[], None]) -> tuple[WebService | None, list[WebService]]:
    others: list[WebService] = []

    def record(service: WebService) -> None:
        if service.name == name:
            raise _ServiceFound(service)
        others.append(service)

    before = set_service_runner(record)
    try:
        run()
    except _ServiceFound as found:
        return found.service, others
    except SystemExit:
        if not others:
            raise
    finally:
        set_service_runner(before)
    return None, others


def _select_service(script: Path, name: str, found: WebService | None, others: list[WebService]) -> WebService:
    if found is not None:
        return found
    if len(others) == 1:
        return others[0]
    names = ", ".join(repr(one.name) for one in others)
    problem = Problem(
        f"the script runs {'no service' if not others else f'several services, none of which is {name!r}'}",
        str(script),
        expected="a prepared WebService and a call of its run_service" if not others else repr(name),
        found=names or "none",
    )
    raise ConfigError([problem])


def _script_error(script: Path, error: BaseException) -> ConfigError:
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(script):
            line = trace.tb_lineno
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.filename == str(script):
        line = error.lineno
    return ConfigError([Problem(f"the script raised {type(error).__name__}: {text_of(error)}", str(script), line)])


@contextmanager
def _process_state(script: Path, config: Path | None) -> Iterator[None]:
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
