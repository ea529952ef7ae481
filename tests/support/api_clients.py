"""Blocking clients of gRPC and REST in threads, and a data plane behind both on the event loop of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import httpx
import trio

from ovmstrio.auth.gate import Gate
from ovmstrio.config.specs import ModelSpec
from ovmstrio.encoding.messages import message_class
from ovmstrio.models.loading import load_model
from ovmstrio.server.front_ends import GrpcFrontEnd, RestFrontEnd
from ovmstrio.serving.authorization import AuthorizingDataPlane
from ovmstrio.serving.data_plane import DataPlane
from tests.support.stub_registry import Load, registry_of
from tests.support.waits import WAIT_SECONDS

ResultT = TypeVar("ResultT")


async def with_triton(address: str, work: Callable[[Any], ResultT]) -> ResultT:
    from tritonclient.grpc import InferenceServerClient

    def connected() -> ResultT:
        with InferenceServerClient(address) as client:
            return work(client)

    return await trio.to_thread.run_sync(connected)


async def with_channel(address: str, work: Callable[[Any], ResultT]) -> ResultT:
    def connected() -> ResultT:
        with grpc.insecure_channel(address) as channel:
            return work(channel)

    return await trio.to_thread.run_sync(connected)


async def call(address: str, path: str, request: Any, response: str, **options: Any) -> Any:
    """Make one unary call; ``request`` is a message or its bytes, ``response`` the name of a message."""
    payload = request if isinstance(request, bytes) else request.SerializeToString()

    def work(channel: Any) -> Any:
        method = channel.unary_unary(path, response_deserializer=message_class(response).FromString)
        return method(payload, **{"timeout": WAIT_SECONDS, **options})

    return await with_channel(address, work)


INTERFACES = ("grpc", "http")


def triton_module(interface: str) -> Any:
    if interface == "grpc":
        import tritonclient.grpc as module
    else:
        import tritonclient.http as module
    return module


@dataclass
class BothInterfaces:
    plane: DataPlane
    grpc: str
    http: str

    def address(self, interface: str) -> str:
        return self.grpc if interface == "grpc" else self.http

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        def work() -> httpx.Response:
            with httpx.Client(base_url=f"http://{self.http}", timeout=WAIT_SECONDS, trust_env=False) as client:
                return client.request(method, path, **options)

        return await trio.to_thread.run_sync(work)

    async def with_triton(self, interface: str, work: Callable[[Any, Any], ResultT]) -> ResultT:
        module = triton_module(interface)

        def connected() -> ResultT:
            with module.InferenceServerClient(self.address(interface)) as client:
                return work(client, module)

        return await trio.to_thread.run_sync(connected)


@asynccontextmanager
async def serving_both(
    specs: Sequence[ModelSpec],
    *,
    load: Load = load_model,
    allows_remote_admin: bool = False,
    gate: Gate | None = None,
    **options: Any,
) -> AsyncIterator[BothInterfaces]:
    """Serve until the block ends; ``options`` configure the data plane."""
    registry = registry_of(load, poll_seconds=0)
    plane = (DataPlane if gate is None else AuthorizingDataPlane)(registry, **options)
    grpc = GrpcFrontEnd(plane, ["127.0.0.1:0"], allows_remote_admin=allows_remote_admin, gate=gate)
    rest = RestFrontEnd(plane, ["127.0.0.1:0"], allows_remote_admin=allows_remote_admin, gate=gate)
    async with trio.open_nursery() as nursery:
        await nursery.start(registry.run)
        assert not (await registry.apply(specs)).failures
        (grpc_address,) = await nursery.start(grpc.serve)
        (http_address,) = await nursery.start(rest.serve)
        plane.begin_serving()
        yield BothInterfaces(plane, grpc_address, http_address)
        nursery.cancel_scope.cancel()
