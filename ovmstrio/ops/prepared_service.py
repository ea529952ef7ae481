"""PreparedService: a script's service with its configuration, its models, and its loader for worker processes."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import trio

from ovmstrio.core.errors import ConfigError
from ovmstrio.ops.config_file import examine_pipeline_config, read_pipeline_config
from ovmstrio.ops.executor.pipeline_source import LoadedPipeline, PipelineSource
from ovmstrio.ops.numpy1_compat import speak_numpy_one, speaks_numpy_one
from ovmstrio.ops.predictor.make import PredictorMaker
from ovmstrio.ops.scripts import MAIN, find_service
from ovmstrio.ops.validate import problem_of_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.errors import Problem
    from ovmstrio.ops.predictor.protocol import MakePredictor, Predictor
    from ovmstrio.ops.settings import OpSettings, PipelineSettings
    from ovmstrio.ops.web_service import WebService

__all__ = ["PreparedService", "load_in_worker"]

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
        examined = examine_pipeline_config(**self._config_arguments())
        return ConfigError([examined.place(problem) for problem in problems])

    def _config_arguments(self) -> dict[str, Any]:
        if self.service.yml_dict is not None:
            return {"yml_dict": self.service.yml_dict}
        file = self.config or self.service.yml_file
        return {"yml_file": file if file is None or self.folder is None else str(self.folder / file)}

    def predictor_maker(self, settings: PipelineSettings) -> MakePredictor:
        """Return a predictor factory whose errors refer to the configuration."""
        maker = PredictorMaker(is_thread_op=settings.dag.is_thread_op)

        async def make(op: OpSettings, worker: int) -> Predictor:
            try:
                return await maker(self._resolve_paths(op), worker)
            except ConfigError as error:
                problems = [problem_of_model(problem, op) for problem in error.problems]
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
            "numpy1_compat": speaks_numpy_one(),
        }
        return PipelineSource(f"{__name__}:{load_in_worker.__name__}", json.dumps(argument))


def _ports_of(config_arguments: dict[str, Any]) -> list[str]:
    settings = examine_pipeline_config(**config_arguments).settings
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
        speak_numpy_one()
    service = find_service(script, options["name"])
    prepared = PreparedService(service, options["config"], script, None if folder is None else Path(folder))
    settings = prepared.settings()
    return LoadedPipeline(service.graph(), settings, prepared.predictor_maker(settings))
