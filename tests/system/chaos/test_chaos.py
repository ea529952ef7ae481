"""Servers that are disturbed in every way answer each call once, rightly or with a true error."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random

import pytest
import trio
import trio.testing

from tests.chaos.ledger import Ledger, Said
from tests.chaos.proxy import Proxy
from tests.chaos.run import chaos

SECONDS = 60
SEED = 7


@pytest.mark.e2e
@pytest.mark.slow
async def test_a_minute_of_everything_at_once(tmp_path: Path) -> None:
    """Reloads, stops, kills, full disks, clock jumps, cuts and hostile clients: no answer is wrong, none is lost."""
    report = await chaos(tmp_path, SECONDS, SEED)
    assert report.ledger.violations() == [], report
    assert sum(count for (_, said), count in report.ledger.counts.items() if said is Said.RIGHT) > 1_000


def test_only_what_a_window_allows_is_excused() -> None:
    """A call that was made while it was open, or just after, by one of those whom it is about."""
    ledger = Ledger()
    before = ledger.began
    with ledger.window("kill", Said.LOST, whom=frozenset({"a"})):
        ledger.note("a", Said.LOST, before)
        ledger.note("a", Said.WRONG, before, "7")
        ledger.note("b", Said.LOST, before, "gone")
        ledger.note("b", Said.RIGHT, before)
    wrong, lost = ledger.violations()
    assert wrong.endswith("a: wrong answers: 7 (meanwhile: kill)")
    assert lost.endswith("b: without an answer: gone (meanwhile: kill)")


def test_what_happens_after_a_window_is_not_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery has its time, and no more."""
    now = 100.0
    monkeypatch.setattr("tests.chaos.ledger.time.monotonic", lambda: now)
    ledger = Ledger(began=now)
    with ledger.window("restart", Said.UNREACHED, after_seconds=3):
        now = 110.0
    now = 112.5
    ledger.note("a", Said.UNREACHED, now)
    assert ledger.violations() == []
    now = 113.5
    ledger.note("a", Said.UNREACHED, now, "refused")
    assert ledger.violations() == ["13.50 to 13.50 s: a: not accepted: refused (meanwhile: nothing)"]


def test_violations_of_one_kind_are_told_once() -> None:
    """With how many there were."""
    ledger = Ledger()
    for _ in range(30):
        ledger.note("a", Said.SILENT, ledger.began, "timed out")
    (told,) = ledger.violations()
    assert told.startswith("30 times, first ")


async def _echo(stream: trio.SocketStream) -> None:
    async with stream:
        async for data in stream:
            await stream.send_all(data)


@asynccontextmanager
async def _proxied() -> AsyncIterator[tuple[Proxy, trio.SocketStream]]:
    """Give a connection through a proxy to a server that sends back what it gets."""
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            proxy, port = await _open(nursery)
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                yield proxy, stream
            nursery.cancel_scope.cancel()


async def _open(nursery: trio.Nursery) -> tuple[Proxy, int]:
    listeners = await nursery.start(trio.serve_tcp, _echo, 0)
    proxy = Proxy(listeners[0].socket.getsockname()[1])
    return proxy, await nursery.start(proxy.run)


async def test_a_proxy_passes_bytes_until_it_cuts() -> None:
    """Both directions, and then neither."""
    async with _proxied() as (proxy, stream):
        await stream.send_all(b"hello")
        assert await stream.receive_some() == b"hello"
        assert proxy.cut() == 2
        with suppress(trio.BrokenResourceError):
            assert await stream.receive_some() == b""


async def test_a_half_closed_connection_ends() -> None:
    """One direction is closed; whoever notices closes the rest."""
    async with _proxied() as (proxy, stream):
        await stream.send_all(b"hello")
        await stream.receive_some()
        await trio.testing.wait_all_tasks_blocked()
        await proxy.half_close(Random(0))
        assert await stream.receive_some() == b""
