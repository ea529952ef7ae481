"""Services of scripts: execution of a script up to ``run_service``, and the prepared service with its configuration.

A stand-alone script is the main module of its process and of each of its worker processes.  On a shared server a
script is the main module only while it runs, and has private modules.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.inference.crash_probe import CrashProbe
from ovmstrio.isolation.handler_imports import HandlerPackage
from ovmstrio.ops.config_file import CONFIG_VARIABLE, read_pipeline_config, validate_pipeline_config
from ovmstrio.ops.executor.pipeline_source import LoadedPipeline, PipelineSource
from ovmstrio.ops.numpy1_compat import has_numpy1_compat, install_numpy1_compat
from ovmstrio.ops.predictor.factory import PredictorFactory
from ovmstrio.ops.validate import locate_model_problem
from ovmstrio.ops.web_service import set_service_runner
from ovmstrio.util.regular_files import read_regular_bytes
from ovmstrio.util.truncation import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ovmstrio.ops.predictor.protocol import CreatePredictor, Predictor
    from ovmstrio.ops.settings import OpSettings, PipelineSettings
    from ovmstrio.ops.web_service import WebService

# Scripts


MAIN: Final = "__main__"
_process: Final = Lock()
"""Held while a script uses the process's arguments, environment and main module."""


class _ServiceFound(BaseException):
    """Signal that ends a script at its service; a BaseException, so that scripts do not catch it."""

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


def run_on_shared_server(script: Path, name: str, config: Path | None) -> tuple[WebService, HandlerPackage]:
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


# Prepared services


_PORTS = ("rpc_port", "http_port")

log = structlog.get_logger(__name__)


def _main_script() -> Path | None:
    file = getattr(sys.modules[MAIN], "__file__", None)
    return None if file is None else Path(file).resolve()


@dataclass(frozen=True, slots=True)
class PreparedService:
    """Service and its origin.

    Attributes:
        service: the service that the script prepared.
        config: configuration file in place of the script's file; a dictionary of the script is kept.
        script: script that worker processes run; default is the main script.
        folder: base of relative paths and parent of the log directory; None for a service that has the process to
            itself, whose base is the current directory.
    """

    service: WebService
    config: str | None = None
    script: Path | None = field(default_factory=_main_script)
    folder: Path | None = None

    def settings(self) -> PipelineSettings:
        """Read the configuration; blocking; raises ConfigError."""
        if self.folder is None:
            return read_pipeline_config(**self._config_arguments())
        config_arguments = self._config_arguments()
        ports = _ports_of(config_arguments)
        if not any(port in _PORTS for port in ports):
            # The shared server has its own ports, and a configuration without ports would be an error.
            settings = read_pipeline_config(**config_arguments, overrides=["rpc_port=0"])
        else:
            settings = read_pipeline_config(**config_arguments)
        if ports:
            log.warning("ports of a service on a shared server ignored", service=self.service.name, ports=ports)
        return replace(settings, logging=replace(settings.logging, folder=self.folder))

    def placed(self, problems: Sequence[Problem]) -> ConfigError:
        """Return an error with the lines of the configuration added to the problems; blocking."""
        examined = validate_pipeline_config(**self._config_arguments())
        return ConfigError([examined.place(problem) for problem in problems])

    def _config_arguments(self) -> dict[str, Any]:
        if self.service.yml_dict is not None:
            return {"yml_dict": self.service.yml_dict}
        file = self.config or self.service.yml_file
        return {"yml_file": file if file is None or self.folder is None else str(self.folder / file)}

    def predictor_factory(self, settings: PipelineSettings, probe: CrashProbe | None = None) -> CreatePredictor:
        """Return a predictor factory whose errors refer to the configuration; ``probe`` runs unknown models first."""
        maker = PredictorFactory(is_thread_op=settings.dag.is_thread_op, probe=probe)

        async def make(op: OpSettings, worker: int) -> Predictor:
            try:
                return await maker(self._resolve_paths(op), worker)
            except ConfigError as error:
                problems = [locate_model_problem(problem, op) for problem in error.problems]
                raise await trio.to_thread.run_sync(self.placed, problems) from error.__cause__

        return make

    def _resolve_paths(self, op: OpSettings) -> OpSettings:
        if self.folder is None:
            return op
        local = op.local_service_conf
        if local.model_config is not None:
            local = replace(local, model_config=str(self.folder / local.model_config))
        client = op.client_config if not op.client_config else str(self.folder / op.client_config)
        return replace(op, local_service_conf=local, client_config=client)

    def source(self) -> PipelineSource | None:
        """Return the source of the pipeline for worker processes; None without a script."""
        if self.script is None:
            return None
        argument = {
            "script": str(self.script),
            "argv": sys.argv if self.folder is None else [str(self.script)],
            "name": self.service.name,
            "config": self.config,
            "folder": None if self.folder is None else str(self.folder),
            "numpy1_compat": has_numpy1_compat(),
        }
        return PipelineSource(f"{__name__}:{load_in_worker.__name__}", json.dumps(argument))


def _ports_of(config_arguments: dict[str, Any]) -> list[str]:
    settings = validate_pipeline_config(**config_arguments).settings
    given = {
        "rpc_port": settings.rpc_port,
        "http_port": settings.http_port,
        "prometheus_port": settings.dag.prometheus_port,
    }
    return [key for key, port in given.items() if port is not None]


def load_in_worker(argument: str) -> LoadedPipeline:
    """Load a service's pipeline in a worker process by running its script up to ``run_service``.

    Raises ConfigError if the script runs no such service or its pipeline is invalid, and any exception of the script.
    """
    options: dict[str, Any] = json.loads(argument)
    sys.argv = options["argv"]
    script, folder = Path(options["script"]), options["folder"]
    if folder is not None:
        sys.path.insert(0, str(script.parent))
    if options["numpy1_compat"]:
        install_numpy1_compat()
    service = find_service(script, options["name"])
    prepared = PreparedService(service, options["config"], script, None if folder is None else Path(folder))
    settings = prepared.settings()
    return LoadedPipeline(service.graph(), settings, prepared.predictor_factory(settings))
