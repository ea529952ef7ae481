"""`ovms serve CONFIG --service SCRIPT`: server for a pipeline of Ops and the script that creates them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ovmstrio.cli.console import EX_USAGE, fail
from ovmstrio.cli.script import execute_script
from ovmstrio.cli.serving import run_to_the_end, set_up_logs, usage

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.ops.graph import WebService
    from ovmstrio.server.settings import ServerSettings


def run_pipeline_service(config: Path | None, script: Path, options: dict[str, Any]) -> None:
    """Serve a script's pipeline until a signal stops it; exit with 64 for a wrong command line, 1 for a failure."""
    if not script.is_file():
        fail(f"--service: {script}: no such file", EX_USAGE)
    if config is not None and not config.is_file():
        fail(f"{config}: no such file; give the pipeline's config.yml", EX_USAGE)
    serve_script(script, [], None if config is None else str(config.absolute()), options)


def serve_script(script: Path, arguments: list[str], config: str | None, options: dict[str, Any]) -> None:
    """Run a script, and serve the service that it runs; exit with 64 for a wrong command line, 1 for a failure."""
    from ovmstrio.server.service_plan import service_settings

    with usage():
        settings = service_settings(options)
    set_up_logs(settings)
    execute_script(script, arguments, config, partial(_serve, settings, config))


def _serve(settings: ServerSettings, config: str | None, service: WebService) -> None:
    from ovmstrio.workers.run_service import serve_service

    code = run_to_the_end(partial(serve_service, service, settings, config), settings)
    if code:
        raise SystemExit(code)
