"""One cancel scope for the calls that a task answers one after the other."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

import pytest
import trio
import trio.testing
from grpclib.const import Cardinality, Handler, Status

from ovmstrio.wire.grpc.lent_scope import LentScope
from tests.support.bare_http2 import BareConnection, framed
from tests.support.waits import WAIT_SECONDS
from tests.unit.wire.grpc.echo import serving

if TYPE_CHECKING:
    from ovmstrio.wire.grpc.stream import Call

_FEW: Final = 13
_TOO_LATE: Final = str(Status.DEADLINE_EXCEEDED.value)


async def test_a_call_that_never_waits_gives_the_scope_back_as_it_was() -> None:
    """Its deadline is not that of the next one."""
    with LentScope() as lent:
        first = lent.lend(trio.current_time() + 1)
        assert not lent.take_back(None)
        assert lent.lend(math.inf) is first
        assert first.deadline == math.inf
        await trio.lowlevel.checkpoint()


async def test_a_call_that_cancels_itself_without_waiting_leaves_another_scope_to_the_next() -> None:
    """And whoever answers them is not cancelled."""
    with LentScope() as lent:
        first = lent.lend(math.inf)
        first.cancel()
        assert not lent.take_back(None)
        assert not lent.lend(math.inf).cancel_called
        await trio.lowlevel.checkpoint()


async def test_a_call_that_waits_keeps_the_scope_and_ends_with_it(autojump_clock: trio.testing.MockClock) -> None:
    """Its deadline is caught where it ends, and the block around takes nothing more."""
    del autojump_clock
    with LentScope() as lent:
        scope = lent.lend(trio.current_time() + 1)
        lent.is_kept = True
        with pytest.raises(trio.Cancelled) as raised:
            await trio.sleep(5)
        assert lent.take_back(raised.value)
        assert scope.cancelled_caught
        await trio.sleep(5)


async def test_an_error_of_a_call_that_waits_is_not_caught() -> None:
    """It is the call's to tell."""
    with LentScope() as lent:
        lent.lend(math.inf)
        lent.is_kept = True
        assert not lent.take_back(ValueError("no"))


class _Service:
    """Calls that say ``cancel`` cancel themselves before they answer, those that say ``wait`` never answer."""

    def __mapping__(self) -> dict[str, Handler]:
        return {"/test.Lent/Ask": Handler(self._ask, Cardinality.UNARY_UNARY, bytes, bytes)}

    async def _ask(self, call: Call) -> None:
        asked = await call.recv_message()
        if asked == b"cancel":
            call.cancel()
        if asked == b"wait":
            await trio.sleep_forever()
        await call.send_message(asked)


async def test_calls_of_one_read_end_each_by_itself() -> None:
    """One that cancels itself, one whose deadline passes while it waits, and those around them."""

    def work(port: int) -> None:
        with BareConnection(port) as peer:
            asked = [b"one", b"cancel", b"two", b"wait", b"three"]
            late = (("grpc-timeout", "50m"),)
            begun = [peer.begin("/test.Lent/Ask", framed(each), late if each == b"wait" else ()) for each in asked]
            peer.send(b"".join(data for _, data in begun))
            answers = [peer.wait(stream) for stream, _ in begun]
            assert [each.status for each in answers] == ["0", "0", "0", _TOO_LATE, "0"]
            assert [each.message for each in answers if each.status == "0"] == [b"one", b"cancel", b"two", b"three"]
            assert peer.ask("/test.Lent/Ask", b"after").message == b"after"

    async with serving(_Service()) as (server, address):
        with trio.fail_after(WAIT_SECONDS):
            port = int(address.rpartition(":")[2])
            await trio.to_thread.run_sync(work, port, abandon_on_cancel=True)
        assert server.active_calls == 0


class _Busy:
    """Calls that keep the event loop for five milliseconds each; remembers in which order they came."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    def __mapping__(self) -> dict[str, Handler]:
        return {"/test.Busy/Ask": Handler(self._ask, Cardinality.UNARY_UNARY, bytes, bytes)}

    async def _ask(self, call: Call) -> None:
        asked = await call.recv_message()
        self.asked.append(asked)
        until = time.perf_counter() + 0.005
        while time.perf_counter() < until:
            pass
        await call.send_message(asked)


async def test_many_calls_of_one_read_let_others_have_their_turn() -> None:
    """Of sixty that have come together, others wait for a few."""
    busy = _Busy()

    def work(port: int) -> None:
        with BareConnection(port) as peer, BareConnection(port) as other:
            other.ask("/test.Busy/Ask", b"first")
            begun = [peer.begin("/test.Busy/Ask", framed(b"many")) for _ in range(60)]
            peer.send(b"".join(data for _, data in begun))
            assert other.ask("/test.Busy/Ask", b"between").message == b"between"
            assert {peer.wait(stream).message for stream, _ in begun} == {b"many"}

    async with serving(busy) as (_, address):
        with trio.fail_after(WAIT_SECONDS):
            port = int(address.rpartition(":")[2])
            await trio.to_thread.run_sync(work, port, abandon_on_cancel=True)
    assert busy.asked.index(b"between") < _FEW
