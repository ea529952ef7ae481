"""Scripts of services: run as Python would run them, in the server and again in each of its worker processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.runtimes.ops.config.pipeline_file import examine_pipeline_config, read_pipeline_config
from ovmstrio.runtimes.ops.examining import problem_of_model
from ovmstrio.runtimes.ops.executor.processes.pipeline_source import LoadedPipeline, PipelineSource
from ovmstrio.runtimes.ops.predictor.make import PredictorMaker
from ovmstrio.runtimes.ops.web_service import set_service_runner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.runtimes.ops import WebService
    from ovmstrio.runtimes.ops.config.op_settings import OpSettings, PipelineSettings
    from ovmstrio.runtimes.ops.predictor.protocol import MakePredictor, Predictor

__all__ = ["load", "placed", "predictor_maker", "run_as_main", "settings_of_service", "source_of"]

_MAIN: Final = "__main__"


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
    code = compile(script.read_bytes(), str(script), "exec")
    module = ModuleType(_MAIN)
    module.__file__ = str(script)
    sys.modules[_MAIN] = module
    exec(code, module.__dict__)  # noqa: S102 - this is what the user wants to be run


def settings_of_service(service: WebService, config: str | None) -> PipelineSettings:
    """Read the configuration of a prepared service; a file of it gives way to ``config``; blocking.

    Raises:
        ConfigError: it cannot be used.
    """
    if service.yml_dict is not None:
        return read_pipeline_config(yml_dict=service.yml_dict)
    return read_pipeline_config(yml_file=config or service.yml_file)


def predictor_maker(service: WebService, config: str | None, settings: PipelineSettings) -> MakePredictor:
    """Give what makes the predictors of a service's Ops, and says of what it cannot make where it is configured."""
    maker = PredictorMaker(is_thread_op=settings.dag.is_thread_op)

    async def make(op: OpSettings, worker: int) -> Predictor:
        try:
            return await maker(op, worker)
        except ConfigError as error:
            problems = [problem_of_model(problem, op) for problem in error.problems]
            raise await trio.to_thread.run_sync(placed, service, config, problems) from error.__cause__

    return make


def placed(service: WebService, config: str | None, problems: Sequence[Problem]) -> ConfigError:
    """Give problems of a service's settings the lines of its configuration; blocking."""
    examined = (
        examine_pipeline_config(config or service.yml_file)
        if service.yml_dict is None
        else examine_pipeline_config(yml_dict=service.yml_dict)
    )
    return ConfigError([examined.place(problem) for problem in problems])


def source_of(service: WebService, config: str | None) -> PipelineSource | None:
    """Tell how worker processes make a service's pipeline: from the main script; None if there is none."""
    script = getattr(sys.modules[_MAIN], "__file__", None)
    if script is None:
        return None
    argument = {"script": str(Path(script).resolve()), "argv": sys.argv, "name": service.name, "config": config}
    return PipelineSource(f"{__name__}:{load.__name__}", json.dumps(argument))


def load(argument: str) -> LoadedPipeline:
    """Make a service's pipeline in a worker process: run its script up to where it would serve.

    Raises:
        ConfigError: the script runs no such service, or its pipeline cannot be made.
        BaseException: whatever the script raises before.
    """
    known: dict[str, Any] = json.loads(argument)
    sys.argv = known["argv"]
    service = _find(Path(known["script"]), known["name"])
    settings = settings_of_service(service, known["config"])
    return LoadedPipeline(service.graph(), settings, predictor_maker(service, known["config"], settings))


def _find(script: Path, name: str) -> WebService:
    def note(service: WebService) -> None:
        if service.name == name:
            raise _Found(service)

    set_service_runner(note)
    try:
        run_as_main(script)
    except _Found as found:
        return found.service
    finally:
        set_service_runner(None)
    message = f"{script} runs no service named {name!r} in a worker process, although it does in the server"
    raise ConfigError([Problem(message, suggestion="let it run the same service whenever it is run")])
