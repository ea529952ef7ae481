"""A handler's HTTP front end on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import trio

from ovmstrio.api.handlers.http.service import HandlerService
from ovmstrio.api.handlers.http.serving import HandlerFrontEnd
from ovmstrio.core.limits import LocalLimit
from ovmstrio.runtimes.handlers.handler import LoadedHandler
from ovmstrio.runtimes.handlers.project import open_handler
from tests.api.rest.servers import Peer
from tests.support.projects import make_project

__all__ = ["PATIENCE_SECONDS", "ServedHandler", "WatchedLimit", "serving_handler"]

PATIENCE_SECONDS = 20


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
        with trio.fail_after(PATIENCE_SECONDS):
            while self.in_flight != count:
                await self._changed.wait()


@dataclass
class ServedHandler:
    """A front end that serves a handler."""

    front_end: HandlerFrontEnd
    handler: LoadedHandler
    limit: WatchedLimit
    address: str

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
            base_url=f"http://{self.address}", timeout=PATIENCE_SECONDS, trust_env=False
        ) as client:
            yield client

    async def ask(self, verb: str = "POST", path: str = "/", *, fast: bool = True, **options: Any) -> httpx.Response:
        """Ask once, by the fast lane or by the application."""
        headers = {**options.pop("headers", {})} | ({} if fast else {"TE": "trailers"})
        async with self.client() as client:
            return await client.request(verb, path, headers=headers, **options)


@asynccontextmanager
async def serving_handler(
    folder: Path, code: str, *, shows_details: bool = False, **keys: Any
) -> AsyncIterator[ServedHandler]:
    """Serve a handler with this code; ``keys`` are those of its ``nucleus.yaml``."""
    project = make_project(folder, code, **keys)
    async with open_handler(project) as handler, trio.open_nursery() as nursery:
        limit = WatchedLimit(project.max_concurrency)
        service = HandlerService(handler, limit, shows_details=shows_details)
        end = HandlerFrontEnd(service, ["127.0.0.1:0"], info=dict, is_ready=lambda: True)
        addresses = await nursery.start(end.serve)
        yield ServedHandler(end, handler, limit, addresses[0])
        nursery.cancel_scope.cancel()
