"""Calls that the task which reads answers, asked for by hostile clients over real sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.wire.grpc import frames
from ovmstrio.wire.grpc.frames import ErrorCode, FrameType, Setting
from tests.support.bare_http2 import Answer, BareConnection, frame, framed
from tests.unit.wire.grpc.echo import echo_server

if TYPE_CHECKING:
    from collections.abc import Callable

_UNARY: Final = "/test.Echo/Unary"
_WAIT: Final = "/test.Echo/Wait"
_CANCEL: Final = ErrorCode.CANCEL.to_bytes(4, "big")
_LARGE: Final = bytes(200_000)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


async def _client(work: Callable[[int], None], address: str) -> None:
    await trio.to_thread.run_sync(work, _port(address), abandon_on_cancel=True)


def _begin(peer: BareConnection, messages: list[bytes], path: str = _UNARY, *further: tuple[str, str]) -> list[int]:
    """Send calls in one piece."""
    begun = [peer.begin(path, framed(each), further) for each in messages]
    peer.send(b"".join(data for _, data in begun))
    return [stream for stream, _ in begun]


def _ended(peer: BareConnection, streams: list[int]) -> list[Answer]:
    return [peer.wait(stream) for stream in streams]


async def test_a_window_that_opens_late_lets_every_answer_through() -> None:
    """Whoever answers waits, and another task reads the WINDOW_UPDATE."""

    def work(port: int) -> None:
        with BareConnection(port, settings={Setting.INITIAL_WINDOW_SIZE: 0}) as peer:
            streams = _begin(peer, [b"%d" % number for number in range(60)])
            peer.send(frame(FrameType.PING, 0, 0, b"are you?"))
            while (got := peer.read()).kind != FrameType.PING:
                peer.take(got)
            assert got.payload == b"are you?"
            peer.send(b"".join(frames.window_update(stream, 100) for stream in reversed(streams)))
            answers = _ended(peer, streams)
            assert [each.message for each in answers] == [b"%d" % number for number in range(60)]
            assert {each.status for each in answers} == {"0"}

    async with echo_server() as (server, _, address):
        await _client(work, address)
        assert server.active_calls == 0


async def test_a_client_that_does_not_read_gets_every_answer_when_it_does() -> None:
    """Its socket is full midway; others are answered meanwhile, and it can ask for more and end what waits."""

    def work(port: int) -> None:
        with BareConnection(port, receive_buffer=4_096) as peer, BareConnection(port) as other:
            streams = _begin(peer, [_LARGE] * 30)
            assert other.ask(_UNARY, b"meanwhile").message == b"meanwhile"
            (waits,) = _begin(peer, [b""], _WAIT)
            peer.send(frame(FrameType.RST_STREAM, 0, waits, _CANCEL))
            streams += _begin(peer, [b"small"] * 3)
            assert other.ask(_UNARY, b"again").message == b"again"
            answers = _ended(peer, streams)
            assert [each.message for each in answers] == [_LARGE] * 30 + [b"small"] * 3
            assert {each.status for each in answers} == {"0"}

    async with echo_server() as (server, _, address):
        await _client(work, address)
        assert server.active_calls == 0
