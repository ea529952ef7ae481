from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import trio

from ovmstrio.core.errors import InvalidRequest, NotFound, Overloaded, ServerError, VersionLoading
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.protocol.descriptors import message_class
from ovmstrio.server.grpc_front_end import GrpcFrontEnd
from ovmstrio.wire.statuses import map_error
from tests.support.grpc_clients import call
from tests.support.pass_through import load_pass_through
from tests.support.stub_registry import registry_of
from tests.support.waits import WAIT_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.service.api.grpc.conftest import Serving

SERVICE = "/inference.GRPCInferenceService"


@pytest.fixture
def plane() -> DataPlane:
    """Give a data plane that serves nothing."""
    return DataPlane(registry_of(load_pass_through, poll_seconds=0))


async def test_every_address_is_served_and_reported(plane: DataPlane, tmp_path: Path) -> None:
    """A port chosen by the system and a Unix socket answer alike, and their addresses are told."""
    path = tmp_path / "grpc.sock"
    async with trio.open_nursery() as nursery:
        front_end = GrpcFrontEnd(plane, ["127.0.0.1:0", f"unix:{path}"])
        addresses = await nursery.start(front_end.serve)

        assert re.fullmatch(r"127\.0\.0\.1:[1-9]\d*", addresses[0])
        assert addresses[1] == f"unix:{path}"
        for address in addresses:
            response = await call(address, f"{SERVICE}/ServerLive", b"", "inference.ServerLiveResponse")
            assert response.live
        nursery.cancel_scope.cancel()
    assert not path.exists()


async def test_a_port_in_use_is_an_error_of_the_start(plane: DataPlane) -> None:
    """Who starts the front end learns that the port is taken."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        front_end = GrpcFrontEnd(plane, [f"127.0.0.1:{taken.getsockname()[1]}"])
        with pytest.RaisesGroup(OSError, allow_unwrapped=True):
            await front_end.serve()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("why"), grpc.StatusCode.INVALID_ARGUMENT),
        (NotFound("why"), grpc.StatusCode.NOT_FOUND),
        (VersionLoading("why"), grpc.StatusCode.UNAVAILABLE),
        (Overloaded("why"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
def test_errors_of_the_domain_keep_their_text(error: ServerError, status: grpc.StatusCode) -> None:
    """An error of the domain becomes its class's status with the same text."""
    mapped = map_error(error)

    assert mapped is not None
    assert (mapped.status.name, mapped.message) == (status.name, "why")


def test_other_errors_are_not_the_callers_business() -> None:
    """An error that was not meant for the caller is left to the transport, which hides it."""
    assert map_error(ValueError("secret")) is None


async def test_a_drain_waits_for_calls_in_flight_and_then_ends_them(serving: Serving) -> None:
    """A call that outlasts the grace is cancelled with UNAVAILABLE, and its servable's work with it."""
    servable = serving.servable
    message = message_class("inference.ModelInferRequest")(
        model_name="echo", parameters={"block": {"bool_param": True}}
    )
    codes: list[grpc.StatusCode] = []

    async def blocked() -> None:
        with pytest.raises(grpc.RpcError) as caught:
            await call(serving.address, f"{SERVICE}/ModelInfer", message, "inference.ModelInferResponse")
        codes.append(caught.value.code())

    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(blocked)
            await servable.blocked.wait()
            await serving.front_end.drain(grace_seconds=0.1)

    assert codes == [grpc.StatusCode.UNAVAILABLE]
    assert servable.cancelled.is_set()
    assert await refuses_connections(serving.address)


async def refuses_connections(address: str) -> bool:
    """Tell whether nobody listens at an address."""
    host, port = address.split(":")
    try:
        stream: Any = await trio.open_tcp_stream(host, int(port))
    except OSError:
        return True
    await stream.aclose()
    return False
