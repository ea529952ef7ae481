"""Common parts of the commands that serve: option errors, logs, and exit codes."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from ovmstrio.cli.console import EX_USAGE, fail, stderr

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from ovmstrio.handlers.config.project_spec import ProjectSpec
    from ovmstrio.server.settings import ServerSettings


@contextmanager
def usage() -> Iterator[None]:
    """Exit with 64 for invalid options, and print all problems."""
    from ovmstrio.server.command_line import UsageError

    try:
        yield
    except UsageError as problems:
        fail("\n       ".join(problems.lines), EX_USAGE)


def set_up_logs(settings: ServerSettings, project: ProjectSpec | None = None) -> None:
    """Configure the logs by the settings or the project; exit with 1 if the log file cannot be opened."""
    from ovmstrio.server.project_process import configure_project_logs
    from ovmstrio.telemetry.log_levels import LOG_LEVEL, parse_log_levels
    from ovmstrio.telemetry.logs import configure_logs
    from ovmstrio.util.stdio import ignore_failed_writes

    # The server must continue if standard error is closed.
    ignore_failed_writes("stdout")
    try:
        if project is None:
            configure_logs(level=settings.log_level, fmt=settings.log_format, path=settings.log_path)
            LOG_LEVEL.set_logger_levels(parse_log_levels(settings.log_levels or ""))
        else:
            configure_project_logs(project.log_level, settings)
    except OSError as error:
        fail(f"--log-path: {settings.log_path} cannot be opened: {error.strerror}")


def run_to_the_end(
    serve: Callable[[], Awaitable[bool]],
    settings: ServerSettings,
    report_failure: Callable[[BaseExceptionGroup[Any]], None] | None = None,
) -> int:
    """Run a server to its end, and return the exit code: 0 after a drain, 1 if it failed to start or was stopped hard.

    With a JSON log, only the log is printed. ``report_failure`` reports why the server could not start. By default the
    reason is printed and also written to a log file, because standard error may be closed.
    """
    import structlog
    import trio

    from ovmstrio.core.errors import ServerError
    from ovmstrio.isolation.print_capture import log_prints

    gently = failed = False
    is_json = settings.log_format == "json"
    reports = [report_failure] if report_failure else [_log_reasons] if is_json else [_print_reasons]
    if settings.log_path is not None and reports == [_print_reasons]:
        reports.append(_log_reasons)
    with log_prints(is_all=True) if is_json else nullcontext():
        try:
            try:
                gently = trio.run(serve)
            except* (ServerError, OSError) as group:
                failed = True
                for report in reports:
                    report(group)
        except Exception as error:
            if settings.log_path is not None:
                structlog.get_logger(__name__).critical("server failed", exc_info=error)
            raise
    return 0 if gently and not failed else 1


def _log_reasons(group: BaseExceptionGroup[Any]) -> None:
    import structlog

    from ovmstrio.server.start_failures import error_message, flatten_errors

    for error in flatten_errors(group):
        structlog.get_logger(__name__).error(error_message(error, with_traceback=True) or str(error))


def _print_reasons(group: BaseExceptionGroup[Any]) -> None:
    from rich.markup import escape

    from ovmstrio.server.start_failures import error_message, flatten_errors

    for error in flatten_errors(group):
        reason = error_message(error, with_traceback=True) or str(error)
        stderr().print(f"[bold red]error:[/] {escape(reason)}", highlight=False, soft_wrap=True)
