from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

import pytest
import trio
import trio.testing
from grpclib.const import Cardinality, Handler, Status

from ovmstrio.wire.grpc import frames
from ovmstrio.wire.grpc.frames import ErrorCode, FrameType, Setting
from ovmstrio.wire.grpc.lent_scope import LentScope
from ovmstrio.wire.grpc.stream import Call
from tests.support.bare_http2 import Answer, BareConnection, frame, framed
from tests.support.waits import WAIT_SECONDS
from tests.unit.wire.grpc.echo import echo_server, serving

_UNARY: Final = "/test.Echo/Unary"
_WAIT: Final = "/test.Echo/Wait"
_CANCEL: Final = ErrorCode.CANCEL.to_bytes(4, "big")
_LARGE: Final = bytes(200_000)


async def _client(work: Callable[[int], None], address: str) -> None:
    with trio.fail_after(WAIT_SECONDS):
        await trio.to_thread.run_sync(work, int(address.rpartition(":")[2]), abandon_on_cancel=True)


def _begin(peer: BareConnection, messages: list[bytes], path: str = _UNARY, *further: tuple[str, str]) -> list[int]:
    begun = [peer.begin(path, framed(each), further) for each in messages]
    peer.send(b"".join(data for _, data in begun))
    return [stream for stream, _ in begun]


def _ended(peer: BareConnection, streams: list[int]) -> list[Answer]:
    return [peer.wait(stream) for stream in streams]


async def test_answers_of_one_read_are_sent_when_their_windows_open_later() -> None:
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


async def test_a_client_that_reads_late_gets_every_answer_and_others_do_not_wait() -> None:
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


_FEW: Final = 13
_TOO_LATE: Final = str(Status.DEADLINE_EXCEEDED.value)


async def test_a_scope_that_was_not_kept_is_lent_again_without_its_deadline() -> None:
    with LentScope() as lent:
        first = lent.lend(trio.current_time() + 1)
        assert not lent.take_back(None)
        assert lent.lend(math.inf) is first
        assert first.deadline == math.inf
        await trio.lowlevel.checkpoint()


async def test_a_cancelled_scope_is_not_lent_again() -> None:
    with LentScope() as lent:
        first = lent.lend(math.inf)
        first.cancel()
        assert not lent.take_back(None)
        assert not lent.lend(math.inf).cancel_called
        await trio.lowlevel.checkpoint()


async def test_a_kept_scope_catches_its_own_deadline(autojump_clock: trio.testing.MockClock) -> None:
    del autojump_clock
    with LentScope() as lent:
        scope = lent.lend(trio.current_time() + 1)
        lent.is_kept = True
        with pytest.raises(trio.Cancelled) as raised:
            await trio.sleep(5)
        assert lent.take_back(raised.value)
        assert scope.cancelled_caught
        await trio.sleep(5)


async def test_a_kept_scope_does_not_catch_errors() -> None:
    with LentScope() as lent:
        lent.lend(math.inf)
        lent.is_kept = True
        assert not lent.take_back(ValueError("no"))


class _Service:
    """Echoes after ``cancel`` has cancelled its call; ``wait`` is never answered."""

    def __mapping__(self) -> dict[str, Handler]:
        return {"/test.Lent/Ask": Handler(self._ask, Cardinality.UNARY_UNARY, bytes, bytes)}

    async def _ask(self, call: Call) -> None:
        message = await call.recv_message()
        if message == b"cancel":
            call.cancel()
        if message == b"wait":
            await trio.sleep_forever()
        await call.send_message(message)


async def test_cancellation_and_deadline_of_a_call_do_not_affect_others_of_the_same_read() -> None:
    def work(port: int) -> None:
        with BareConnection(port) as peer:
            messages = [b"one", b"cancel", b"two", b"wait", b"three"]
            late = (("grpc-timeout", "50m"),)
            begun = [peer.begin("/test.Lent/Ask", framed(each), late if each == b"wait" else ()) for each in messages]
            peer.send(b"".join(data for _, data in begun))
            answers = [peer.wait(stream) for stream, _ in begun]
            assert [each.status for each in answers] == ["0", "0", "0", _TOO_LATE, "0"]
            assert [each.message for each in answers if each.status == "0"] == [b"one", b"cancel", b"two", b"three"]
            assert peer.ask("/test.Lent/Ask", b"after").message == b"after"

    async with serving(_Service()) as (server, address):
        await _client(work, address)
        assert server.active_calls == 0


class _Busy:
    """Blocks the event loop for five milliseconds per call, and keeps the order of the calls."""

    def __init__(self) -> None:
        self.order: list[bytes] = []

    def __mapping__(self) -> dict[str, Handler]:
        return {"/test.Busy/Ask": Handler(self._ask, Cardinality.UNARY_UNARY, bytes, bytes)}

    async def _ask(self, call: Call) -> None:
        message = await call.recv_message()
        self.order.append(message)
        until = time.perf_counter() + 0.005
        while time.perf_counter() < until:
            pass
        await call.send_message(message)


async def test_slow_calls_of_one_read_do_not_delay_other_connections() -> None:
    busy = _Busy()

    def work(port: int) -> None:
        with BareConnection(port) as peer, BareConnection(port) as other:
            other.ask("/test.Busy/Ask", b"first")
            begun = [peer.begin("/test.Busy/Ask", framed(b"many")) for _ in range(60)]
            peer.send(b"".join(data for _, data in begun))
            assert other.ask("/test.Busy/Ask", b"between").message == b"between"
            assert {peer.wait(stream).message for stream, _ in begun} == {b"many"}

    async with serving(busy) as (_, address):
        await _client(work, address)
    assert busy.order.index(b"between") < _FEW
