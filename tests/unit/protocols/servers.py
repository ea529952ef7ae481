"""A REST front end over a real registry and data plane, served on loopback, and raw socket clients."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import trio
import trio.testing

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ModelFailure
from ovmstrio.server.front_ends import RestFrontEnd
from ovmstrio.serving.data_plane import DataPlane
from ovmstrio.serving.registry import Registry
from tests.support.stub_registry import PassThrough, load_pass_through, registry_of
from tests.support.waits import WAIT_SECONDS

ResultT = TypeVar("ResultT")
BODY = b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[0.5,-1]}]}'


@dataclass
class HttpAnswer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Peer:
    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self._buffer = b""

    async def send(self, data: bytes) -> None:
        with trio.fail_after(WAIT_SECONDS):
            await self.stream.send_all(data)

    async def answer(self, *, has_body: bool = True) -> HttpAnswer:
        answer = await self._next_answer(has_body=has_body)
        while answer.status < 200:
            answer = await self._next_answer(has_body=has_body)
        return answer

    async def _next_answer(self, *, has_body: bool) -> HttpAnswer:
        with trio.fail_after(WAIT_SECONDS):
            while b"\r\n\r\n" not in self._buffer:
                await self._more()
            head, self._buffer = self._buffer.split(b"\r\n\r\n", 1)
            status, *lines = head.decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            length = int(headers.get("content-length", "0")) if has_body else 0
            while len(self._buffer) < length:
                await self._more()
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        assert status.startswith("HTTP/1.1 ")
        return HttpAnswer(int(status.split()[1]), headers, body)

    async def ask(self, data: bytes) -> HttpAnswer:
        await self.send(data)
        return await self.answer()

    async def until(self, text: bytes) -> bytes:
        with trio.fail_after(WAIT_SECONDS):
            while text not in self._buffer:
                await self._more()
        received, self._buffer = self._buffer, b""
        return received

    async def rest(self) -> bytes:
        with trio.fail_after(WAIT_SECONDS), contextlib.suppress(trio.BrokenResourceError):
            while data := await self.stream.receive_some():
                self._buffer += data
        rest, self._buffer = self._buffer, b""
        return rest

    async def _more(self) -> None:
        data = await self.stream.receive_some()
        assert data, f"the server closed the connection after {self._buffer!r}"
        self._buffer += data


@dataclass
class Serving:
    front_end: RestFrontEnd
    plane: DataPlane
    registry: Registry
    specs: list[ModelSpec]
    address: str

    @property
    def servable(self) -> PassThrough:
        servable = self.registry.peek("echo")
        assert isinstance(servable, PassThrough)
        return servable

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Peer]:
        host, _, port = self.address.rpartition(":")
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            yield Peer(stream)

    async def with_http(self, work: Callable[[httpx.Client], ResultT]) -> ResultT:
        def connected() -> ResultT:
            with httpx.Client(base_url=f"http://{self.address}", timeout=WAIT_SECONDS, trust_env=False) as client:
                return work(client)

        return await trio.to_thread.run_sync(connected)

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self.with_http(lambda client: client.get(path, **options))

    async def post(self, path: str, **options: Any) -> httpx.Response:
        return await self.with_http(lambda client: client.post(path, **options))

    async def wait_blocked(self) -> None:
        with trio.fail_after(WAIT_SECONDS):
            await self.servable.blocked.wait()

    async def wait_closed(self) -> None:
        with trio.fail_after(WAIT_SECONDS):
            while self.front_end.open_connections:
                await trio.testing.wait_all_tasks_blocked(0.005)


def infer_head(length: int | str | None, *extra: str, model: str = "echo", suffix: str = "") -> bytes:
    """Encode the head of an inference request; without a length it has no Content-Length."""
    lines = [f"POST /v2/models/{model}{suffix}/infer HTTP/1.1", "Host: localhost", *extra]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join([*lines, "\r\n"]).encode("latin-1")


def infer_post(body: bytes = BODY, *extra: str, model: str = "echo", suffix: str = "") -> bytes:
    """Encode an inference request for the fast lane."""
    return infer_head(len(body), *extra, model=model, suffix=suffix) + body


async def load_version_1(spec: Any, version: int, directory: Path) -> Any:
    """Load version 1, and fail for version 2 with a reason that is not UTF-8."""
    if version == 2:
        raise ModelFailure("the file is <b>broken</b> \udcff")
    return await load_pass_through(spec, version, directory)


@asynccontextmanager
async def stack(
    repository: Path,
    *,
    models: tuple[ModelSpec, ...] = (),
    loader: Any = load_pass_through,
    plane_class: type[DataPlane] = DataPlane,
    **options: Any,
) -> AsyncIterator[tuple[DataPlane, Registry, list[ModelSpec]]]:
    """Run a registry with ``echo`` in versions 1 and 2, and ``models``; ``options`` are those of the data plane."""
    registry = registry_of(loader, poll_seconds=0)
    plane = plane_class(registry, **options)
    base = repository / "echo"
    for version in ("1", "2"):
        (base / version).mkdir(parents=True, exist_ok=True)
    specs = [
        ModelSpec.model_validate({"name": "echo", "base_path": base, "version_policy": {"kind": "all"}}),
        *models,
    ]
    async with trio.open_nursery() as nursery:
        await nursery.start(registry.run)
        await registry.apply(specs)
        plane.begin_serving()
        yield plane, registry, specs
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def serving_rest(
    repository: Path,
    *,
    address: str = "127.0.0.1:0",
    front_end: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Serving]:
    """Serve as long as the block lasts; ``front_end`` holds the front end's own options."""
    async with stack(repository, **options) as (plane, registry, specs), trio.open_nursery() as nursery:
        server = RestFrontEnd(plane, [address], **(front_end or {}))
        addresses = await nursery.start(server.serve)
        yield Serving(server, plane, registry, specs, addresses[0])
        nursery.cancel_scope.cancel()
