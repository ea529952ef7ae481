"""Where the figures of a running pipeline come from: its HTTP port, which its ``config.yml`` can tell."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.ops.config.pipeline_file import examine_pipeline_config

__all__ = ["TRACE_PATH", "NoFigures", "NoServer", "NoTarget", "find_url", "open_source"]

TRACE_PATH: Final = "/trace"
_DEFAULT_NAME: Final = "config.yml"


class NoTarget(Exception):
    """The command line names nothing that figures could come from."""


class NoServer(Exception):
    """Nobody answers."""


class NoFigures(Exception):
    """The server has no figures of a pipeline."""


def find_url(target: str) -> str:
    """Give the address of a server: that of a configuration file or its directory on this machine, or as it is given.

    Raises:
        NoTarget: there is no HTTP port in the file, or the target is neither.
    """
    path = Path(target)
    file = path / _DEFAULT_NAME if path.is_dir() else path
    if file.is_file():
        return f"http://127.0.0.1:{_http_port(file)}"
    address = target if target.startswith(("http://", "https://")) else f"http://{target}"
    try:
        port = httpx.URL(address).port
    except httpx.InvalidURL as error:
        raise NoTarget(f"{target} is neither a file nor HOST:PORT: {error}") from None
    if port is None and address.startswith("http:"):
        raise NoTarget(f"{file}: no such file; give a config.yml, its directory, or HOST:PORT of the HTTP port")
    return address.rstrip("/")


def _http_port(file: Path) -> int:
    try:
        settings = examine_pipeline_config(file).settings
    except ConfigError as error:
        raise NoTarget(str(error)) from None
    if not settings.http_port:
        raise NoTarget(f"{file}: there is no http_port in it; give HOST:PORT of the HTTP port")
    return settings.http_port


@asynccontextmanager
async def open_source(url: str, patience: float) -> AsyncIterator[Callable[[], Awaitable[dict[str, Any]]]]:
    """Give what reads the figures, waiting for so many seconds each time.

    Owns the connection until the block is left; may be cancelled at any time.
    """
    async with httpx.AsyncClient(base_url=url, timeout=patience, trust_env=False) as client:

        async def read() -> dict[str, Any]:
            """Read the figures of now; raises NoServer or NoFigures, and may be cancelled."""
            try:
                answer = await client.get(TRACE_PATH)
            except httpx.TransportError as error:
                raise NoServer(f"{url} does not answer: {str(error) or type(error).__name__}") from None
            return _figures(answer, url)

        yield read


def _figures(answer: httpx.Response, url: str) -> dict[str, Any]:
    try:
        figures = answer.json() if answer.is_success else None
    except ValueError:
        figures = None
    if not isinstance(figures, dict) or not {"ops", "requests", "channels"} <= set(figures):
        status = answer.status_code
        raise NoFigures(
            f"{url}{TRACE_PATH} has no figures of a pipeline (status {status}): is it a pipeline's HTTP port?"
        )
    return figures
