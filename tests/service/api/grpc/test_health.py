from __future__ import annotations

from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self

import grpc
import pytest
import trio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.grpc_clients import with_channel
from tests.support.waits import WAIT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.service.api.grpc.conftest import Serving

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def check(serving: Serving, service: str) -> int:
    """Ask grpcio's own health client."""

    def work(channel: Any) -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        status: int = health_pb2_grpc.HealthStub(channel).Check(request, timeout=WAIT_SECONDS).status
        return status

    return await with_channel(serving.address, work)


class Watch:
    """One ``Watch`` call of grpcio's client, read in a thread; use within ``async with``."""

    def __init__(self, address: str, service: str) -> None:
        self._channel = grpc.insecure_channel(address)
        request = health_pb2.HealthCheckRequest(service=service)
        self._call = health_pb2_grpc.HealthStub(self._channel).Watch(request, timeout=WAIT_SECONDS)

    async def next(self) -> int:
        """Wait for the next status."""
        return await trio.to_thread.run_sync(lambda: next(self._call).status)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()
        await trio.to_thread.run_sync(self._channel.close)


@pytest.mark.parametrize("service", ["", "inference.GRPCInferenceService", "echo"])
async def test_check_tells_that_the_server_and_its_servables_serve(serving: Serving, service: str) -> None:
    """The server, the inference service and each servable are SERVING once they can be called."""
    assert await check(serving, service) == SERVING


async def test_check_of_an_unknown_service_is_not_found(serving: Serving) -> None:
    """A name that nothing has is NOT_FOUND, with the name in the text."""
    with pytest.raises(grpc.RpcError) as caught:
        await check(serving, "nothing")

    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert 'unknown service "nothing"' in caught.value.details()


async def test_check_follows_a_drain(serving: Serving) -> None:
    """A server that is told to stop is NOT_SERVING while it still answers."""
    serving.plane.begin_drain()

    assert await check(serving, "") == NOT_SERVING


async def test_watch_tells_each_change(serving: Serving) -> None:
    """A watch of the server gets the status at once, and then one message a change."""
    async with Watch(serving.address, "") as watch:
        assert await watch.next() == SERVING
        serving.plane.begin_drain()
        assert await watch.next() == NOT_SERVING
        serving.plane.begin_serving()
        assert await watch.next() == SERVING


async def test_watch_follows_a_servable_through_its_life(serving: Serving) -> None:
    """A watch of a servable tells its retirement and its return."""
    async with Watch(serving.address, "echo") as watch:
        assert await watch.next() == SERVING
        await serving.registry.apply([])
        assert await watch.next() == NOT_SERVING
        await serving.registry.apply([serving.spec])
        assert await watch.next() == SERVING


async def test_watch_of_an_unknown_service_goes_on_until_it_is_known(serving: Serving) -> None:
    """A watch of a name that nothing has says so and tells when a servable of that name appears."""
    async with Watch(serving.address, "later") as watch:
        assert await watch.next() == SERVICE_UNKNOWN
        await serving.registry.apply([serving.spec, serving.spec.model_copy(update={"name": "later"})])
        while (status := await watch.next()) == NOT_SERVING:
            pass
        assert status == SERVING


def wait_for_end(call: Any, opened: Callable[[], None]) -> grpc.StatusCode:
    """Tell when the first answer is there, and give the status with which the stream then ends."""
    next(call)
    opened()
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    code: grpc.StatusCode = caught.value.code()
    return code


def hold_watch_open(channel: Any, opened: Callable[[], None]) -> grpc.StatusCode:
    """Open a health watch, tell when the first answer is there, and wait until it ends."""
    return wait_for_end(channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=WAIT_SECONDS), opened)


def hold_reflection_open(channel: Any, opened: Callable[[], None]) -> grpc.StatusCode:
    """Open a reflection stream, tell when the first answer is there, and wait until it ends."""
    requests: SimpleQueue[bytes | None] = SimpleQueue()
    requests.put(b"")
    method = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    call = method(iter(requests.get, None), timeout=WAIT_SECONDS)
    try:
        return wait_for_end(call, opened)
    finally:
        requests.put(None)


@pytest.mark.parametrize("hold", [hold_watch_open, hold_reflection_open])
async def test_streams_without_end_do_not_hold_up_a_drain(
    serving: Serving, hold: Callable[[Any, Callable[[], None]], grpc.StatusCode]
) -> None:
    """Watches and reflection streams end with UNAVAILABLE as soon as a drain begins."""
    is_open = trio.Event()
    codes: list[grpc.StatusCode] = []

    async def run() -> None:
        opened = partial(trio.from_thread.run_sync, is_open.set)
        codes.append(await with_channel(serving.address, lambda channel: hold(channel, opened)))

    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await is_open.wait()
            await serving.front_end.drain(grace_seconds=WAIT_SECONDS * 2)

    assert codes == [grpc.StatusCode.UNAVAILABLE]
