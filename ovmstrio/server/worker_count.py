"""How many processes serve a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.config.specs import GraphSpec, HandlerSpec, OpPipelineSpec, PipelineSpec
from ovmstrio.work.cores import usable_cores

if TYPE_CHECKING:
    from ovmstrio.config.specs import ServerSpec
    from ovmstrio.server.settings import ServerSettings

__all__ = ["count_workers"]

_OF_PYTHON: Final = (GraphSpec, HandlerSpec, OpPipelineSpec, PipelineSpec)
"""What may run Python code of users, which needs a process to fill a core; OpenVINO fills all of them from one."""


def count_workers(settings: ServerSettings, spec: ServerSpec) -> int:
    """Tell how many processes serve a configuration: as many as was said, or what suits it.

    For ``auto`` that is one for models alone, and as many as there are cores that the process may use where there may
    be Python code of users.
    """
    if settings.workers:
        return settings.workers
    runs_python = any(isinstance(service, _OF_PYTHON) for service in spec.services)
    return usable_cores() if runs_python else 1
