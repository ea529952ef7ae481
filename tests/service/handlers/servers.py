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
from ovmstrio.handlers.handler_loading import LoadedHandler, open_handler
from ovmstrio.handlers.handler_service import HandlerService
from ovmstrio.handlers.models.library import open_models
from ovmstrio.server.front_ends import RestFrontEnd
from tests.support.projects import make_project
from tests.support.stub_registry import open_plane_of
from tests.support.waits import WAIT_SECONDS, until_async
from tests.unit.protocols.servers import Peer


@dataclass
class ServedHandler:
    front_end: RestFrontEnd
    handler: LoadedHandler
    limit: LocalLimit
    address: str
    handler_name: str
    is_fast: bool

    @property
    def instance(self) -> Any:
        return self.handler.instance

    @property
    def lane_headers(self) -> dict[str, str]:
        return {} if self.is_fast else {"TE": "trailers"}

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Peer]:
        host, _, port = self.address.rpartition(":")
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            yield Peer(stream)

    async def ask(self, verb: str = "POST", path: str = "/", **options: Any) -> httpx.Response:
        headers = self.lane_headers | options.pop("headers", {})
        async with httpx.AsyncClient(timeout=WAIT_SECONDS, trust_env=False) as client:
            return await client.request(verb, f"http://{self.address}{path}", headers=headers, **options)

    async def wait_in_flight(self, count: int) -> None:
        await until_async(lambda: self.limit.in_flight == count)


@asynccontextmanager
async def serving_handler(
    folder: Path,
    code: str,
    *,
    is_fast: bool = True,
    shows_details: bool = False,
    max_body_bytes: int = 64 * 2**20,
    queue_timeout: float = 0,
    **keys: Any,
) -> AsyncIterator[ServedHandler]:
    """Serve a handler with this code; ``keys`` are those of its ``nucleus.yaml``."""
    project = make_project(folder, code, **keys)
    spec = HandlerSpec(name=project.name, base_path=project.directory, path=project.file)
    limit = LocalLimit(project.max_concurrency)
    async with open_models(project) as models, open_handler(project, queue_timeout=queue_timeout) as handler:
        servable = HandlerService(project.name, handler, limit, None, models)
        servable.gone()
        async with open_plane_of(spec, servable, lambda: "") as plane, trio.open_nursery() as nursery:
            options: dict[str, Any] = {"shows_details": shows_details, "max_body_bytes": max_body_bytes}
            end = RestFrontEnd(plane, ["127.0.0.1:0"], root=project.name, **options)
            addresses = await nursery.start(end.serve)
            yield ServedHandler(end, handler, limit, addresses[0], project.name, is_fast)
            nursery.cancel_scope.cancel()
