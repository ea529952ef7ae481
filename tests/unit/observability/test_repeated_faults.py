"""Faults of peers are logged once, and counted."""

from __future__ import annotations

import structlog
import trio
import trio.testing
from structlog.testing import capture_logs

from ovmstrio.observability.repeated_faults import RepeatedFaults


async def _start(nursery: trio.Nursery, *, most: int = 10) -> RepeatedFaults:
    faults = RepeatedFaults(structlog.get_logger("wire"), window_seconds=60, most=most)
    nursery.start_soon(faults.sum_up)
    await trio.testing.wait_all_tasks_blocked()
    return faults


async def test_repetitions_of_a_fault_are_one_line_per_minute(
    autojump_clock: trio.testing.MockClock,
) -> None:
    with capture_logs() as lines:
        async with trio.open_nursery() as nursery:
            faults = await _start(nursery)
            for port in range(1000):
                faults.tell("connection fault", peer=f"10.0.0.1:{port}", kind="PROTOCOL_ERROR", fault=f"frame {port}")
            await trio.sleep(59)
            at_first = list(lines)
            await trio.sleep(2)
            nursery.cancel_scope.cancel()
    (first,) = at_first
    assert (first["event"], first["peer"], first["fault"]) == ("connection fault", "10.0.0.1:0", "frame 0")
    (second,) = lines[1:]
    assert second["event"] == "fault repeated"
    assert (second["fault"], second["peer"], second["kind"]) == ("connection fault", "10.0.0.1", "PROTOCOL_ERROR")
    assert (second["times"], second["seconds"]) == (999, 60)


async def test_peers_and_kinds_are_separate_and_a_later_fault_is_logged_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    with capture_logs() as lines:
        async with trio.open_nursery() as nursery:
            faults = await _start(nursery)
            faults.tell("tls handshake failed", peer="[::1]:50")
            faults.tell("tls handshake failed", peer="10.0.0.2:50")
            faults.tell("connection fault", peer="[::1]:51", kind="a")
            faults.tell("connection fault", peer="[::1]:52", kind="b")
            await trio.sleep(61)
            faults.tell("tls handshake failed", peer="[::1]:53")
            nursery.cancel_scope.cancel()
    assert [line["peer"] for line in lines] == ["[::1]:50", "10.0.0.2:50", "[::1]:51", "[::1]:52", "[::1]:53"]
    assert all(line["log_level"] == "info" for line in lines)


async def test_addresses_without_ports_are_separate_peers() -> None:
    hosts = ["10.0.0.1", "::1", "2001:db8::5", "2001:db8::6", "[2001:db8::7]"]
    with capture_logs() as lines:
        async with trio.open_nursery() as nursery:
            faults = await _start(nursery)
            for host in (*hosts, *hosts):
                faults.tell("change refused", peer=host)
            nursery.cancel_scope.cancel()
    logged = [(line["event"], line["peer"]) for line in lines]
    assert logged == [(event, host) for event in ("change refused", "fault repeated") for host in hosts]


async def test_peers_beyond_the_limit_are_counted_together() -> None:
    with capture_logs() as lines:
        async with trio.open_nursery() as nursery:
            faults = await _start(nursery, most=3)
            for number in range(100):
                faults.tell("tls handshake failed", peer=f"10.0.0.{number}:1")
            nursery.cancel_scope.cancel()
    assert [line["peer"] for line in lines[:4]] == ["10.0.0.0:1", "10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"]
    (last,) = lines[4:]
    assert (last["peer"], last["times"]) == ("others", 96)
