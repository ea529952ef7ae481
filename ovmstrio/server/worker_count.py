"""How many processes serve a configuration, and what only one process can serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.config.specs import GraphSpec, HandlerSpec, OpPipelineSpec, PipelineSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.work.cores import usable_cores

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ovmstrio.config.specs import ServerSpec
    from ovmstrio.server.settings import ServerSettings

__all__ = ["check_workers", "count_workers"]

_OF_PYTHON: Final = (GraphSpec, HandlerSpec, OpPipelineSpec, PipelineSpec)
"""What may run Python code of users, which needs a process to fill a core; OpenVINO fills all of them from one."""


def count_workers(settings: ServerSettings, spec: ServerSpec) -> int:
    """Tell how many processes serve a configuration: as many as was said, or what suits it.

    For ``auto`` that is one for models alone, and where there is something that one process has to serve; as many as
    there are cores that the process may use where there may be Python code of users.

    Raises:
        ConfigError: it says a number, and something cannot be served by several.
    """
    if settings.workers:
        check_workers(settings)
        return settings.workers
    runs_python = any(isinstance(service, _OF_PYTHON) for service in spec.services)
    if not runs_python or any(_objections(settings)):
        return 1
    return usable_cores()


def check_workers(settings: ServerSettings, workers: int | None = None) -> None:
    """See that a configuration can be served by as many processes.

    Args:
        settings: of the server.
        workers: how many processes there are; as many as the settings say by default.

    Raises:
        ConfigError: it cannot; all that is in the way is told.
    """
    count = settings.workers if workers is None else workers
    problems = list(_objections(settings)) if count > 1 else []
    if problems:
        raise ConfigError(problems)


def _objections(settings: ServerSettings) -> Iterator[Problem]:
    """Tell what has to be in one process."""
    for option, what in (("allow_shared_memory", "regions of shared memory are registered with one process"),):
        if getattr(settings, option):
            yield Problem(f"{what}, and --workers asks for several", path=f"--{option}", suggestion="use --workers 1")
    if settings.model_control == "explicit":
        text = "names are loaded by one process, and --workers asks for several"
        yield Problem(text, path="--model_control explicit", suggestion="use --workers 1")
