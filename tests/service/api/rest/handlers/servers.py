"""A handler's HTTP front end on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import trio

from ovmstrio.config.specs import HandlerSpec
from ovmstrio.core.limits import LocalLimit
from ovmstrio.runtimes.handlers.handler import LoadedHandler
from ovmstrio.runtimes.handlers.models.clients import open_clients
from ovmstrio.runtimes.handlers.mounting import HandlerServable
from ovmstrio.runtimes.handlers.project import open_handler
from ovmstrio.server.rest_front_end import RestFrontEnd
from tests.support.lone_service import open_plane_of
from tests.support.projects import make_project
from tests.support.waits import WAIT_SECONDS
from tests.unit.api.rest.servers import Peer

__all__ = ["ServedHandler", "WatchedLimit", "serving_handler"]


class WatchedLimit(LocalLimit):
    """A limit that can be waited for."""

    def __init__(self, maximum: int) -> None:
        super().__init__(maximum)
        self._changed = trio.Event()

    def take(self) -> None:
        """Count one more, and tell."""
        super().take()
        self._tell()

    def give_back(self) -> None:
        """Count one less, and tell."""
        super().give_back()
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def wait(self, count: int) -> None:
        """Return once so many requests are in flight."""
        with trio.fail_after(WAIT_SECONDS):
            while self.in_flight != count:
                await self._changed.wait()


@dataclass
class ServedHandler:
    """A front end that serves a handler."""

    front_end: RestFrontEnd
    handler: LoadedHandler
    limit: WatchedLimit
    address: str
    handler_name: str

    @property
    def instance(self) -> Any:
        """The object of the user's class."""
        return self.handler.instance

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Peer]:
        """Open a connection; it is closed when the block ends."""
        host, _, port = self.address.rpartition(":")
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            yield Peer(stream)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """Open an HTTP client."""
        async with httpx.AsyncClient(
            base_url=f"http://{self.address}", timeout=WAIT_SECONDS, trust_env=False
        ) as client:
            yield client

    async def ask(self, verb: str = "POST", path: str = "/", *, fast: bool = True, **options: Any) -> httpx.Response:
        """Ask once, by the fast lane or by the application."""
        headers = {**options.pop("headers", {})} | ({} if fast else {"TE": "trailers"})
        async with self.client() as client:
            return await client.request(verb, path, headers=headers, **options)


@asynccontextmanager
async def serving_handler(
    folder: Path,
    code: str,
    *,
    shows_details: bool = False,
    max_body_bytes: int = 64 * 2**20,
    queue_timeout: float = 0,
    **keys: Any,
) -> AsyncIterator[ServedHandler]:
    """Serve a handler with this code; ``keys`` are those of its ``nucleus.yaml``."""
    project = make_project(folder, code, **keys)
    spec = HandlerSpec(name=project.name, base_path=project.directory, path=project.file)
    limit = WatchedLimit(project.max_concurrency)
    async with open_clients(project) as models, open_handler(project, queue_timeout=queue_timeout) as handler:
        servable = HandlerServable(project.name, handler, limit, None, models)
        servable.gone()
        async with open_plane_of(spec, servable, lambda: "") as plane, trio.open_nursery() as nursery:
            options: dict[str, Any] = {"shows_details": shows_details, "max_body_bytes": max_body_bytes}
            end = RestFrontEnd(plane, ["127.0.0.1:0"], root=project.name, **options)
            addresses = await nursery.start(end.serve)
            yield ServedHandler(end, handler, limit, addresses[0], project.name)
            nursery.cancel_scope.cancel()
