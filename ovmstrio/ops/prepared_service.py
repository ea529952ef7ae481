"""A service that a script has prepared: its configuration, its models and how worker processes make it anew."""

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
    """A service, and where it comes from.

    Attributes:
        service: what the script has prepared.
        config: a file that takes the place of the one that the script names; a dictionary of the script stays.
        script: what worker processes run; the main script if none is given.
        folder: for a service beside others, the one from which its paths lead on, and in which its log files are;
            None for one that is alone, for which it is the current one.
    """

    service: WebService
    config: str | None = None
    script: Path | None = field(default_factory=_main_script)
    folder: Path | None = None

    def settings(self) -> PipelineSettings:
        """Read the configuration; blocking.

        Raises:
            ConfigError: it cannot be used.
        """
        if self.folder is None:
            return read_pipeline_config(**self._where())
        where = self._where()
        ports = _ports_of(where)
        if not any(port in _PORTS for port in ports):
            # The server's ports are its own, and a configuration needs none beside others.
            settings = read_pipeline_config(**where, overrides=["rpc_port=0"])
        else:
            settings = read_pipeline_config(**where)
        if ports:
            log.warning("the ports of a service beside others have no effect", service=self.service.name, ports=ports)
        return replace(settings, logging=replace(settings.logging, folder=self.folder))

    def placed(self, problems: Sequence[Problem]) -> ConfigError:
        """Give problems of the settings the lines of the configuration; blocking."""
        examined = examine_pipeline_config(**self._where())
        return ConfigError([examined.place(problem) for problem in problems])

    def _where(self) -> dict[str, Any]:
        if self.service.yml_dict is not None:
            return {"yml_dict": self.service.yml_dict}
        file = self.config or self.service.yml_file
        return {"yml_file": file if file is None or self.folder is None else str(self.folder / file)}

    def predictor_maker(self, settings: PipelineSettings) -> MakePredictor:
        """Give what makes the predictors of the Ops, and says of what it cannot make where it is configured."""
        maker = PredictorMaker(is_thread_op=settings.dag.is_thread_op)

        async def make(op: OpSettings, worker: int) -> Predictor:
            try:
                return await maker(self._rooted(op), worker)
            except ConfigError as error:
                problems = [problem_of_model(problem, op) for problem in error.problems]
                raise await trio.to_thread.run_sync(self.placed, problems) from error.__cause__

        return make

    def _rooted(self, op: OpSettings) -> OpSettings:
        """Let the paths of an Op's models lead on from the service's folder."""
        if self.folder is None:
            return op
        local = op.local_service_conf
        if local.model_config is not None:
            local = replace(local, model_config=str(self.folder / local.model_config))
        client = op.client_config if not op.client_config else str(self.folder / op.client_config)
        return replace(op, local_service_conf=local, client_config=client)

    def source(self) -> PipelineSource | None:
        """Tell how worker processes make the pipeline; None if there is no script."""
        if self.script is None:
            return None
        argument = {
            "script": str(self.script),
            "argv": sys.argv if self.folder is None else [str(self.script)],
            "name": self.service.name,
            "config": self.config,
            "folder": None if self.folder is None else str(self.folder),
            "numpy_one": speaks_numpy_one(),
        }
        return PipelineSource(f"{__name__}:{load_in_worker.__name__}", json.dumps(argument))


def _ports_of(where: dict[str, Any]) -> list[str]:
    """Tell which ports a configuration has."""
    settings = examine_pipeline_config(**where).settings
    given = {
        "rpc_port": settings.rpc_port,
        "http_port": settings.http_port,
        "prometheus_port": settings.dag.prometheus_port,
    }
    return [key for key, port in given.items() if port is not None]


def load_in_worker(argument: str) -> LoadedPipeline:
    """Make a service's pipeline in a worker process: run its script up to where it would serve.

    Raises:
        ConfigError: the script runs no such service, or its pipeline cannot be made.
        BaseException: whatever the script raises before.
    """
    known: dict[str, Any] = json.loads(argument)
    sys.argv = known["argv"]
    script, folder = Path(known["script"]), known["folder"]
    if folder is not None:
        sys.path.insert(0, str(script.parent))
    if known["numpy_one"]:
        speak_numpy_one()
    service = find_service(script, known["name"])
    prepared = PreparedService(service, known["config"], script, None if folder is None else Path(folder))
    settings = prepared.settings()
    return LoadedPipeline(service.graph(), settings, prepared.predictor_maker(settings))
