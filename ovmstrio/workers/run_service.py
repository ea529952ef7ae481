"""Op pipeline services of scripts: implementation of ``run_service``."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

import trio

from ovmstrio.core.errors import ServerError
from ovmstrio.server.service_plan import plan_service, service_settings
from ovmstrio.server.start_failures import error_message, flatten_errors
from ovmstrio.telemetry.logs import configure_logs
from ovmstrio.workers.serve import serve_in_processes

if TYPE_CHECKING:
    from ovmstrio.ops.graph import WebService
    from ovmstrio.server.settings import ServerSettings


async def serve_service(service: WebService, settings: ServerSettings, config: str | None = None) -> bool:
    """Serve a prepared service until stopped; return whether the server drained cleanly.

    Raises:
        ConfigError: invalid configuration, Ops or ports, or an Op cannot be prepared.
        OSError: a port cannot be bound, or ``ProcessInfo.json`` cannot be written.

    Errors may be in an exception group.
    """
    plan = await trio.to_thread.run_sync(plan_service, service, settings, config)
    return await serve_in_processes(plan)


def run_script_service(service: WebService) -> None:
    """Serve the service of a script that was started by Python directly.

    Raises:
        SystemExit: with 1, the server could not start or cancelled requests; the reason is on standard error.
    """
    configure_logs()
    try:
        gently = trio.run(partial(serve_service, service, service_settings({})))
    except* (ServerError, OSError) as group:
        for error in flatten_errors(group):
            sys.stderr.write(f"error: {error_message(error, with_traceback=True)}\n")
        raise SystemExit(1) from None
    if not gently:
        raise SystemExit(1)
