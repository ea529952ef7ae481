"""`ovms serve CONFIG --service SCRIPT`: a pipeline of Ops with the script that makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ovms_cli.console import EX_USAGE, fail

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.ops_server import ServiceOptions
    from ovmstrio.server.settings import ServeSettings

__all__ = ["hosts_of", "run_pipeline_service"]

_OWN: Final = frozenset(
    {
        "port",
        "rest_port",
        "grpc_bind_address",
        "rest_bind_address",
        "drain_seconds",
        "log_level",
        "log_format",
        "log_path",
    }
)
"""Options that mean the same as for models; the configuration has all others."""


def run_pipeline_service(config: Path | None, script: Path, options: dict[str, Any]) -> None:
    """Serve a script's pipeline until it is told to stop; exits with 64 for a wrong command line, 1 for a failure."""
    from ovms_cli.run import execute_script
    from ovmstrio.ops_server import run_service

    if not script.is_file():
        fail(f"--service: {script}: no such file", EX_USAGE)
    if config is not None and not config.is_file():
        fail(f"{config}: no such file; give the pipeline's config.yml", EX_USAGE)
    settings = _settings(options)
    _configure_logs(settings)
    file = None if config is None else str(config.absolute())
    how = _service_options(settings, options, file)
    execute_script(script, [], file, lambda service: run_service(service, how))


def hosts_of(addresses: str) -> list[str]:
    """Spell out comma-separated addresses of this machine; exits with 64 for a socket file."""
    parts = [part.strip() for part in addresses.split(",") if part.strip()]
    if not parts or any(part.startswith("unix:") for part in parts):
        fail(f"{addresses!r}: a pipeline service listens on addresses such as 127.0.0.1 or [::1]", EX_USAGE)
    return [f"[{part.strip('[]')}]" if ":" in part else part for part in parts]


def _settings(options: dict[str, Any]) -> ServeSettings:
    from pydantic import ValidationError

    from ovmstrio.server.settings import ServeSettings

    foreign = sorted(set(options) - _OWN)
    if foreign:
        names = ", ".join(f"--{name}" for name in foreign)
        fail(f"{names} cannot be used with --service; the service's config.yml has its settings", EX_USAGE)
    try:
        return ServeSettings.model_validate(options)
    except ValidationError as error:
        lines = [f"--{fault['loc'][0]}: {fault['msg']}" for fault in error.errors()]
        fail("\n       ".join(lines), EX_USAGE)


def _configure_logs(settings: ServeSettings) -> None:
    from ovmstrio.observability.logs import configure_logs

    try:
        configure_logs(level=settings.log_level, fmt=settings.log_format, path=settings.log_path)
    except OSError as error:
        fail(f"--log_path: {settings.log_path} cannot be opened: {error.strerror}")


def _service_options(settings: ServeSettings, given: dict[str, Any], config: str | None) -> ServiceOptions:
    from ovmstrio.ops_server import ServiceOptions

    return ServiceOptions(
        config=config,
        rpc_port=settings.port if "port" in given else None,
        http_port=settings.rest_port if "rest_port" in given else None,
        grpc_hosts=hosts_of(settings.grpc_bind_address) if "grpc_bind_address" in given else None,
        http_hosts=hosts_of(settings.rest_bind_address) if "rest_bind_address" in given else None,
        drain_seconds=settings.drain_seconds,
    )
