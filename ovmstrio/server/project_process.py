"""Logs and process environment of a handler project's server."""

from __future__ import annotations

import io
import logging
import os
import sys
from typing import TYPE_CHECKING, Any, Final

import structlog

from ovmstrio.handlers.cortex.log import JsonFormatter, StdoutHandler
from ovmstrio.telemetry.log_levels import LOADING_LOGGERS, LOG_LEVEL, parse_log_levels
from ovmstrio.telemetry.log_writer import LogOutlet, StandardSink
from ovmstrio.telemetry.logs import add_call_ids, add_worker_number, configure_logs

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from ovmstrio.handlers.config.project_spec import LogLevel, ProjectSpec
    from ovmstrio.server.settings import ServerSettings

# Logs

_SETTINGS: Final = frozenset({"log_level", "log_format", "log_path"})
_LOGGERS: Final = ("cortex", "uvicorn", "uvicorn.error", "uvicorn.access")
_RECORD_ATTRIBUTES: Final = frozenset({"name", "module", "args", "process", "thread", "filename", "message"})
"""Record attributes that must not be used as extra keys."""
_NOISY_LOGGERS: Final = (
    "asyncio",
    "httpx",
    "httpx2",
    "httpcore",
    "httpcore2",
    "botocore",
    "boto3",
    "urllib3",
    "s3transfer",
    "PIL",
)
# Loading of a single project is logged by the server itself.
_FLOORS: Final = {
    **dict.fromkeys(_LOGGERS, logging.NOTSET),
    **dict.fromkeys((*_NOISY_LOGGERS, *LOADING_LOGGERS), logging.WARNING),
}


def configure_project_logs(level: LogLevel, settings: ServerSettings) -> None:
    """Configure logs by the settings if they have log options, else JSON lines as handlers write them.

    Raises:
        OSError: the log file cannot be opened.
    """
    if _SETTINGS.isdisjoint(settings.model_fields_set):
        _configure_json_lines(level)
    else:
        configure_logs(level=settings.log_level, fmt=settings.log_format, path=settings.log_path)
    LOG_LEVEL.set_logger_levels(parse_log_levels(settings.log_levels or ""))


def _configure_json_lines(level: LogLevel) -> None:
    """Send all records of at least this level to standard output."""
    number = logging.getLevelNamesMapping()[level.upper()]
    StdoutHandler.outlet = LogOutlet(StandardSink("stdout"))
    StdoutHandler.outlet.setFormatter(JsonFormatter())
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Line buffering keeps printed lines of handlers in order with log lines.
        sys.stdout.reconfigure(line_buffering=True)
    logging.basicConfig(handlers=[StdoutHandler()], force=True)
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.propagate = False
        if not any(isinstance(each, StdoutHandler) for each in logger.handlers):
            logger.addHandler(StdoutHandler())
    LOG_LEVEL.begin(number, _FLOORS)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            add_call_ids,
            add_worker_number,
            _rename_reserved,
            structlog.stdlib.render_to_log_kwargs,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


def _rename_reserved(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key in _RECORD_ATTRIBUTES & event.keys():
        event[f"{key}_"] = event.pop(key)
    return event


# Process environment


def enter_project(project: ProjectSpec, port: int) -> None:
    """Set the project's environment variables and working directory for the process.

    ``.env`` has precedence over ``env:``, and both over the variables that describe the server.
    """
    variables = {
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
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.update(project.environment)
    os.chdir(project.directory)
