"""Requests that come together over one connection reach a pipeline of Ops in the order in which they have come."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import h2.events
import pytest
import trio

from ovmstrio.protocol.descriptors import message_class
from ovmstrio.protocol.pipeline_messages import METHOD, REQUEST
from tests.support.op_pipelines import EchoExecutor, serving_pipeline
from tests.support.scheduling import COINS, scheduled
from tests.unit.wire.grpc.bytes_client import message, request_headers
from tests.unit.wire.grpc.peers import Peer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

KSERVE = "/inference.GRPCInferenceService/ModelInfer"
NUMBERS = list(range(20))


def _paddle(number: int) -> bytes:
    written: bytes = REQUEST(key=["x"], value=[str(number)], name="uci").SerializeToString()
    return written


def _infer(number: int) -> bytes:
    given = [{"name": "x", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [str(number).encode()]}}]
    request = message_class("inference.ModelInferRequest")
    written: bytes = request(model_name="uci", inputs=given).SerializeToString()
    return written


DOORS = {"Paddle Serving": (METHOD, _paddle), "KServe": (KSERVE, _infer)}


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Peer]:
    """Connect to a server."""
    host, _, port = address.rpartition(":")
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        yield await Peer(stream).start()


def _send(peer: Peer, path: str, body: bytes) -> int:
    stream_id = int(peer.h2.get_next_available_stream_id())
    peer.h2.send_headers(stream_id, request_headers(path))
    peer.h2.send_data(stream_id, message(body), end_stream=True)
    return stream_id


def _seen(executor: EchoExecutor) -> list[int]:
    return [int(request.values[0]) for request in executor.requests]


@pytest.mark.parametrize("coin", COINS)
@pytest.mark.parametrize("limits", [{}, {"max_concurrency": 1, "max_queue": 50}, {"max_concurrency": 3}], ids=str)
@pytest.mark.parametrize("door", DOORS)
async def test_requests_of_one_read_come_in_their_order(door: str, limits: dict[str, Any], coin: str) -> None:
    """Through either door, whatever trio does, where they wait to be admitted too."""
    path, write = DOORS[door]
    executor = EchoExecutor()
    async with serving_pipeline(executor, **limits) as running, connected(running.grpc[0]) as peer:
        with scheduled(coin):
            calls = [_send(peer, path, write(number)) for number in NUMBERS]
            await peer.flush()
            for each in calls:
                await peer.wait_for(h2.events.StreamEnded, each)
        assert [(await peer.trailers(each))["grpc-status"] for each in calls] == ["0"] * len(calls)
    assert _seen(executor) == NUMBERS


async def test_requests_that_fail_or_leave_hold_up_nobody() -> None:
    """Garbage, wrong names, and a call that is reset."""
    executor = EchoExecutor()
    async with serving_pipeline(executor) as running, connected(running.grpc[0]) as peer:
        bad = [_send(peer, METHOD, b"\xff\xff"), _send(peer, METHOD, REQUEST(name="nope").SerializeToString())]
        peer.h2.reset_stream(_send(peer, METHOD, _paddle(99)))
        calls = [_send(peer, METHOD, _paddle(number)) for number in NUMBERS]
        await peer.flush()
        for each in (*bad, *calls):
            await peer.wait_for(h2.events.StreamEnded, each)
        assert [(await peer.trailers(each))["grpc-status"] for each in bad] == ["3", "0"]
    assert [number for number in _seen(executor) if number in NUMBERS] == NUMBERS
