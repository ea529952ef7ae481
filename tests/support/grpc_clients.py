"""Blocking gRPC clients, run in a thread each, for servers on the test's own event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import trio

from ovmstrio.protocol.descriptors import message_class
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
