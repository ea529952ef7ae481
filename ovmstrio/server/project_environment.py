"""What a process is made to look like before a project's handler is imported."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ovmstrio.runtimes.handlers.config.project_spec import ProjectSpec

__all__ = ["enter_project"]


def enter_project(project: ProjectSpec, port: int) -> None:
    """Export the project's environment, and make its folder the working directory; for the whole process.

    What ``.env`` says counts more than ``env:``, and both more than what describes the server itself.
    """
    described = {
        "CORTEX_LOG_LEVEL": project.log_level.upper(),
        "CORTEX_SERVING_PORT": port,
        "CORTEX_SERVING_PROTOCOL": project.protocol,
        "CORTEX_PROCESSES": project.processes,
        "CORTEX_THREADS_PER_PROCESS": project.threads_per_process,
        "CORTEX_MAX_CONCURRENCY": project.max_concurrency,
        "CORTEX_PROJECT_DIR": project.directory,
        "CORTEX_PYTHON_PATH": project.python_path,
        "CORTEX_MODEL_SERVER_CONFIG": project.file,
        "CORTEX_PROTOBUF_FILE": project.protobuf_path or "",
    }
    os.environ.update({name: str(value) for name, value in described.items()})
    os.environ.update(project.environment)
    os.chdir(project.directory)
