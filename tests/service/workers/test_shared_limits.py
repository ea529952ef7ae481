from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import psutil
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from ovmstrio.auth.key_file import CallerEntry, write_key_file
from ovmstrio.auth.quota import SharedQuota
from ovmstrio.core.callers import ALL_SCOPES
from ovmstrio.core.errors import CallerLimited, NotSupported, Overloaded, TooManyRequests
from ovmstrio.core.limits import NO_LIMIT, Limit
from ovmstrio.server.credentials import CredentialStore
from ovmstrio.server.settings import ServerSettings
from ovmstrio.serving.admission import SharedAdmission
from ovmstrio.workers import shared_state
from ovmstrio.workers.shared_state import ServiceLimit, SharedCounters, SharedState, WorkerWakeups
from tests.support.examples import examples
from tests.support.waits import WAIT_SECONDS, until, until_async

Hold = Callable[[SharedAdmission, list[str], str], Awaitable[trio.Event]]


class _Processes:
    """The shared counts of several workers, in one process."""

    def __init__(self, rows: int = 2) -> None:
        self._stack = ExitStack()
        self.state = SharedState.create(rows)
        self._stack.callback(self.state.close)
        secret = os.urandom(8).hex()
        self.counters: list[SharedCounters] = []
        for row in range(rows):
            state = SharedState(os.dup(self.state.descriptor), rows)
            self._stack.callback(state.close)
            wakeups = WorkerWakeups(secret, row)
            self._stack.enter_context(wakeups.open())
            self.counters.append(SharedCounters(state, row, wakeups))

    def close(self) -> None:
        self._stack.close()

    def admissions(self, server: Limit = NO_LIMIT, **limits: Limit) -> list[SharedAdmission]:
        return [SharedAdmission(each, server, lambda name: limits.get(name, NO_LIMIT)) for each in self.counters]


@pytest.fixture
def processes() -> Iterator[_Processes]:
    made = _Processes()
    yield made
    made.close()


class _Clock:
    """A monotonic clock that tests set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


# Callers


def _allowances(processes: _Processes, **limits: float) -> list[SharedQuota]:
    entry = CallerEntry("ann", ALL_SCOPES, sha256="0" * 64, **limits)  # type: ignore[arg-type]  # numbers
    return [SharedQuota(counters, entry) for counters in processes.counters]


def test_concurrency_of_a_caller_is_counted_over_all_workers(processes: _Processes) -> None:
    one, other = _allowances(processes, concurrency=2)
    one.acquire()
    other.acquire()
    for each in (one, other):
        with pytest.raises(CallerLimited, match="2 concurrent requests"):
            each.acquire()
    one.release()
    other.acquire()
    with pytest.raises(CallerLimited):
        one.acquire()


def test_request_rate_of_a_caller_is_counted_over_all_workers(processes: _Processes, clock: _Clock) -> None:
    one, other = _allowances(processes, requests_per_second=2)
    one.acquire()
    other.acquire()
    with pytest.raises(CallerLimited, match=r"try again in 0\.5 s"):
        one.acquire()
    clock.now += 0.5
    other.acquire()
    with pytest.raises(CallerLimited):
        one.acquire()


def test_token_rate_of_a_caller_is_counted_over_all_workers(processes: _Processes, clock: _Clock) -> None:
    one, other = _allowances(processes, tokens_per_minute=60)
    one.spend_tokens(69)
    with pytest.raises(CallerLimited, match="60 tokens per minute; try again in 10 s"):
        other.check_tokens()
    clock.now += 10
    other.check_tokens()


def test_concurrency_of_an_ended_worker_is_released(processes: _Processes) -> None:
    one, other = _allowances(processes, concurrency=1, tokens_per_minute=60)
    one.acquire()
    one.spend_tokens(600)
    with pytest.raises(CallerLimited):
        other.acquire()
    processes.state.clear(0)
    other.acquire()
    with pytest.raises(CallerLimited, match="tokens per minute"):
        other.check_tokens()


def test_limits_are_counted_by_name(processes: _Processes) -> None:
    one, other = (ServiceLimit(counters, "p", 1) for counters in processes.counters)
    ServiceLimit(processes.counters[0], "q", 1).acquire()
    one.acquire()
    with pytest.raises(TooManyRequests, match="1 requests are in flight"):
        other.acquire()
    one.release()
    other.acquire()


def test_unused_limits_make_room_for_new_ones(processes: _Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_state, "MAX_COUNTER_ROWS", 2)
    one, other = processes.counters
    (first, second), theirs = (one.row(name) for name in "ab"), other.row("a")
    with one.locked():
        first.write(1)
        second.write(1)
    with pytest.raises(NotSupported, match="2 limits in use"):
        other.row("c")
    with one.locked():
        second.write(0)
    third = other.row("c")
    with one.locked():
        assert theirs.elsewhere().in_flight == 1
        third.write(1)
        assert first.in_flight == 1
        with pytest.raises(NotSupported):
            _ = second.in_flight
        third.write(0)
        assert second.in_flight == 0
        second.write(3)
    assert one.row("b").in_flight == 3
    with one.locked():
        first.write(0)
        assert third.elsewhere().in_flight == 0
        third.write(7)
        assert (second.in_flight, other.row("b").elsewhere().in_flight) == (3, 3)


def test_recently_used_buckets_keep_their_room(
    processes: _Processes, clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_state, "MAX_COUNTER_ROWS", 1)
    one, other = _allowances(processes, tokens_per_minute=60)
    one.spend_tokens(600)
    with pytest.raises(NotSupported):
        processes.counters[0].row("b")
    with pytest.raises(CallerLimited):
        other.check_tokens()
    clock.now += 600
    processes.counters[0].row("b")
    other.check_tokens()


async def test_callers_beyond_the_capacity_keep_the_known_ones(
    processes: _Processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shared_state, "MAX_COUNTER_ROWS", 1)
    file = tmp_path / "keys.json"
    entry = CallerEntry("ann", ALL_SCOPES, sha256="0" * 64, concurrency=1)
    write_key_file(file, [entry])
    access = CredentialStore(ServerSettings(keys_file=file), processes.counters[0])
    account = processes.counters[1].row(f"caller {entry!r}")
    with processes.counters[1].locked():
        account.write(1)
    write_key_file(file, [CallerEntry("bob", ALL_SCOPES, sha256="1" * 64, concurrency=1)])
    with capture_logs() as logs:
        for _ in range(2):
            assert await access.look()
    assert [(line["event"], "1 limits" in line["reason"]) for line in logs] == [("credentials not reloaded", True)]
    with processes.counters[1].locked():
        account.write(0)
    with capture_logs() as logs:
        assert await access.look()
    assert [line["event"] for line in logs] == ["credentials reloaded"]


# Lock

_HOLDER = """
import os, signal, sys
from ovmstrio.workers.shared_state import SharedState

state = SharedState(int(sys.argv[1]), 2)
with state.locked():
    os.kill(os.getpid(), signal.SIGSTOP)
    state.set_in_flight(1, 1)
with state.locked():
    state.set_in_flight(1, state.in_flight(1) + 1)
"""


def _is_stopped(process: subprocess.Popen[bytes]) -> bool:
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


def test_a_stopped_holder_of_the_lock_delays_the_others_once_and_briefly(
    processes: _Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (ServiceLimit(counters, "p", 2) for counters in processes.counters)
    pauses: list[float] = []
    sleep = time.sleep

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        sleep(seconds)

    descriptor = processes.state.descriptor
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, str(descriptor)], pass_fds=[descriptor])
    try:
        until(lambda: _is_stopped(holder))
        monkeypatch.setattr(time, "sleep", pause)
        one.acquire()
        paused = len(pauses)
        assert 0 < sum(pauses) <= 0.05
        other.acquire()
        with pytest.raises(TooManyRequests):
            one.acquire()
        assert len(pauses) == paused
        monkeypatch.undo()
        assert _is_stopped(holder)
        assert processes.state.in_flight(1) == 0
        holder.send_signal(signal.SIGCONT)
        assert holder.wait(WAIT_SECONDS) == 0
        assert processes.state.in_flight(1) == 2
    finally:
        holder.kill()
        holder.wait()
    other.release()
    one.acquire()


# Calls


@asynccontextmanager
async def _admitting(*followed: SharedAdmission) -> AsyncIterator[Hold]:
    """Follow changes of other workers; yields a function that starts a call, which lasts until its event is set."""
    async with trio.open_nursery() as nursery:
        for admission in followed:
            nursery.start_soon(admission.follow_others)

        async def hold(admission: SharedAdmission, admitted: list[str], name: str, done: trio.Event) -> None:
            with await admission.enter("m"):
                admitted.append(name)
                await done.wait()

        async def start(admission: SharedAdmission, admitted: list[str], name: str) -> trio.Event:
            done = trio.Event()
            nursery.start_soon(hold, admission, admitted, name, done)
            await trio.testing.wait_all_tasks_blocked()
            return done

        yield start
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("server", "model"), [(Limit(1, 1), NO_LIMIT), (NO_LIMIT, Limit(1, 1))])
async def test_calls_and_queues_are_counted_over_all_workers(
    processes: _Processes, server: Limit, model: Limit
) -> None:
    one, other = processes.admissions(server, m=model)
    admitted: list[str] = []
    async with _admitting(one, other) as start:
        place = await one.enter("m")
        done = await start(other, admitted, "other")
        for each in (one, other):
            with pytest.raises(Overloaded, match="1 calls under way and 1 waiting"):
                await each.enter("m")
        assert admitted == []
        place.release()
        await until_async(lambda: admitted == ["other"])
        done.set()


async def test_calls_are_admitted_in_order_of_arrival_over_all_workers(processes: _Processes) -> None:
    one, other = processes.admissions(m=Limit(1, 9))
    admitted: list[str] = []
    async with _admitting(one, other) as start:
        arrivals = ((one, "first"), (other, "second"), (one, "third"))
        ends = [await start(admission, admitted, name) for admission, name in arrivals]
        for number, done in enumerate(ends, 1):
            await until_async(lambda number=number: len(admitted) == number)  # type: ignore[misc]  # the loop's own
            done.set()
    assert admitted == ["first", "second", "third"]


async def test_calls_of_an_ended_worker_are_released(processes: _Processes) -> None:
    one, other = processes.admissions(m=Limit(1, 1))
    admitted: list[str] = []
    async with _admitting(other) as start:
        await one.enter("m")
        done = await start(other, admitted, "other")
        processes.state.clear(0)
        processes.counters[1].notify((1,))
        await until_async(lambda: admitted == ["other"])
        done.set()


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from("mn"), st.booleans()), min_size=1, max_size=12),
    st.integers(0, 2),
    st.integers(1, 2),
)
def test_every_call_is_admitted_within_the_limits(calls: list[tuple[int, str, bool]], server: int, most: int) -> None:
    in_flight = {"m": 0, "n": 0}
    answered: list[int] = []

    async def call(admission: SharedAdmission, number: int, name: str, *, is_cancelled: bool) -> None:
        with trio.move_on_after(0.001 if is_cancelled else WAIT_SECONDS):
            with await admission.enter(name):
                in_flight[name] += 1
                try:
                    assert in_flight[name] <= most
                    assert not server or sum(in_flight.values()) <= server
                    await trio.lowlevel.checkpoint()
                finally:
                    in_flight[name] -= 1
                answered.append(number)
                return
        assert is_cancelled

    async def run() -> None:
        made = _Processes(3)
        try:
            admissions = made.admissions(Limit(server, 99), m=Limit(most, 99), n=Limit(most, 99))
            async with trio.open_nursery() as following:
                for admission in admissions:
                    following.start_soon(admission.follow_others)
                with trio.fail_after(WAIT_SECONDS):
                    async with trio.open_nursery() as nursery:
                        for number, (row, name, is_cancelled) in enumerate(calls):
                            nursery.start_soon(
                                lambda *given: call(*given[:3], is_cancelled=given[3]),
                                admissions[row],
                                number,
                                name,
                                is_cancelled,
                            )
                following.cancel_scope.cancel()
        finally:
            made.close()

    trio.run(run)
    assert {number for number, (_, _, is_cancelled) in enumerate(calls) if not is_cancelled} <= set(answered)
