from __future__ import annotations

import itertools
import math
import re
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from ovmstrio.core.errors import QueueTimeExceeded
from ovmstrio.core.limits import NO_LIMIT, Limit
from ovmstrio.serving.admission import Admission
from ovmstrio.serving.load_shedding import CallCounts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio.testing import MockClock

    from ovmstrio.core.events import Interface


class _Clients:
    """Clients that call a service at a constant rate and wait for a limited time, and the outcomes of their calls.

    Args:
        admission: the admission of the server.
        run: the service.
    """

    def __init__(self, admission: Admission, run: Callable[[], Awaitable[None]]) -> None:
        self._admission = admission
        self._run = run
        self._ended = self._in_flight = 0
        self.answered: list[float] = []
        self.refused: list[QueueTimeExceeded] = []
        self.given_up = 0

    async def call(self, rate: float, seconds: float, *, waits: float, has_deadline: bool) -> None:
        """Call at ``rate`` per second for ``seconds``; clients wait ``waits`` seconds, by a deadline or not."""
        async with trio.open_nursery() as nursery:
            for _ in range(round(rate * seconds)):
                nursery.start_soon(self._call_once, waits, has_deadline)
                await trio.sleep(1 / rate)

    async def _call_once(self, waits: float, has_deadline: bool) -> None:
        begun = trio.current_time()
        with trio.CancelScope(deadline=begun + waits if has_deadline else math.inf) as scope:
            if has_deadline:
                await self._serve(begun, "gRPC")
                return
            async with trio.open_nursery() as nursery:

                async def disconnect() -> None:
                    await trio.sleep(waits)
                    scope.cancel()

                nursery.start_soon(disconnect)
                await self._serve(begun, "REST")
                nursery.cancel_scope.cancel()

    async def _serve(self, begun: float, interface: Interface) -> None:
        try:
            place = await self._admission.enter("m", interface=interface)
        except QueueTimeExceeded as error:
            self.refused.append(error)
            return
        with place:
            self._in_flight += 1
            try:
                await self._run()
                self.answered.append(trio.current_time() - begun)
            except trio.Cancelled:
                self.given_up += 1
                self._ended += 1
                fastest = min(self.answered, default=math.inf)
                counts = CallCounts(self._ended, len(self.answered), self._in_flight, fastest)
                self._admission.record_give_up("m", interface, trio.current_time() - begun, counts)
                raise
            finally:
                self._in_flight -= 1
            self._ended += 1


def _queueing(places: int, seconds: float) -> Callable[[], Awaitable[None]]:
    """Return a service that runs some calls at once, first come, first served."""
    limiter = trio.CapacityLimiter(places)

    async def run() -> None:
        async with limiter:
            # A running call ends although its client has given up.
            with trio.CancelScope(shield=True):
                await trio.sleep(seconds)
        await trio.lowlevel.checkpoint_if_cancelled()

    return run


def _sharing(seconds: float, step: float = 0.001) -> Callable[[], Awaitable[None]]:
    """Return a service that runs all calls at once on one core, which they share."""
    running = 0

    async def run() -> None:
        nonlocal running
        running += 1
        left = seconds
        try:
            # A thread runs on although its client has given up.
            with trio.CancelScope(shield=True):
                while left > 0:
                    await trio.sleep(step * running)
                    left -= step
        finally:
            running -= 1
        await trio.lowlevel.checkpoint_if_cancelled()

    return run


def _waiting(*seconds: float) -> Callable[[], Awaitable[None]]:
    """Return a service that waits for another one, in turn for each of the times, however many calls it has."""
    times = itertools.cycle(seconds)

    async def run() -> None:
        await trio.sleep(next(times))

    return run


@pytest.fixture(autouse=True)
def mock_perf_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ovmstrio.serving.admission.perf_counter", trio.current_time)


_KINDS: dict[str, tuple[Callable[[], Callable[[], Awaitable[None]]], int]] = {
    "one place": (lambda: _queueing(1, 0.05), 20),
    "four places": (lambda: _queueing(4, 0.1), 40),
    "shared core": (lambda: _sharing(0.03, 0.01), 33),
}


@pytest.mark.parametrize("has_deadline", [pytest.param(True, id="deadline"), pytest.param(False, id="disconnect")])
@pytest.mark.parametrize("kind", _KINDS)
async def test_overloaded_service_answers_nearly_as_many_calls_as_it_can(
    kind: str, *, has_deadline: bool, autojump_clock: MockClock
) -> None:
    make, capacity = _KINDS[kind]
    clients = _Clients(Admission(), make())
    await clients.call(2 * capacity, 30, waits=1.0, has_deadline=has_deadline)
    assert len(clients.answered) >= 0.9 * capacity * 30
    # A limit of the service turns it off, and nearly all calls end too late.
    unshed = _Clients(Admission(limit_of=lambda _: Limit(10_000)), make())
    await unshed.call(2 * capacity, 10, waits=1.0, has_deadline=has_deadline)
    assert not unshed.refused
    assert len(unshed.answered) < 0.3 * capacity * 10


async def test_refusal_names_the_times(autojump_clock: MockClock) -> None:
    clients = _Clients(Admission(), _queueing(1, 0.05))
    await clients.call(40, 5, waits=1.0, has_deadline=True)
    assert re.fullmatch(
        r'"m" is overloaded: \d+ calls are under way, so that a call would probably end after its client has given up '
        r"\(1 s\); try again in 1 s",
        clients.refused[-1].message,
    )


async def test_bursts_of_patient_clients_are_answered_in_full(autojump_clock: MockClock) -> None:
    admission = Admission()
    clients = _Clients(admission, _queueing(1, 0.05))
    await clients.call(10_000, 0.1, waits=math.inf, has_deadline=False)
    assert (len(clients.answered), clients.refused) == (1000, [])
    # Others who give up do not make patient clients of the other interface wait for nothing.
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(clients.call, 40, 20, waits=1.0, has_deadline=True))
        await trio.sleep(10)
        before = len(clients.refused)
        patient = _Clients(admission, _queueing(1, 0.05))
        await patient.call(100, 1, waits=math.inf, has_deadline=False)
        assert (len(patient.answered), patient.refused) == (100, [])
    assert before


@pytest.mark.parametrize("rate", [5, 500])
async def test_clients_that_leave_early_cause_no_refusal(rate: int, autojump_clock: MockClock) -> None:
    clients = _Clients(Admission(), _waiting(0.5))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(clients.call, 50, 30, waits=10.0, has_deadline=False))
        nursery.start_soon(partial(clients.call, rate, 30, waits=0.1, has_deadline=False))
    assert (clients.refused, len(clients.answered), clients.given_up) == ([], 1500, 30 * rate)


async def test_shedding_ends_where_it_does_not_help(autojump_clock: MockClock) -> None:
    # A third of the calls takes too long, however many there are at once.
    shed = _Clients(Admission(), _waiting(0.8, 0.8, 1.2))
    unshed = _Clients(Admission(limit_of=lambda _: Limit(10_000)), _waiting(0.8, 0.8, 1.2))
    await shed.call(20, 120, waits=1.0, has_deadline=True)
    await unshed.call(20, 120, waits=1.0, has_deadline=True)
    assert shed.refused
    assert len(shed.answered) > 0.9 * len(unshed.answered)


async def test_shedding_ends_with_the_overload(autojump_clock: MockClock) -> None:
    admission = Admission()
    clients = _Clients(admission, _queueing(1, 0.05))
    await clients.call(40, 10, waits=1.0, has_deadline=True)
    is_shedding = [admission.is_shedding]
    await clients.call(10, 15, waits=1.0, has_deadline=True)
    assert [*is_shedding, admission.is_shedding] == [True, False]
    assert not await _refused(clients, rate=10)


@pytest.mark.parametrize("seconds", [1, 3, 8])
async def test_a_program_that_ends_with_its_calls_causes_no_refusal(seconds: int, autojump_clock: MockClock) -> None:
    admission = Admission()
    clients = _Clients(admission, _queueing(1, 0.01))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(clients.call, 80, 30, waits=math.inf, has_deadline=False))
        for _ in range(30 // seconds):
            with trio.move_on_after(seconds):
                await clients.call(1000, 0.1, waits=math.inf, has_deadline=False)
                await clients.call(100, 30, waits=math.inf, has_deadline=False)
    assert (clients.refused, admission.is_shedding, clients.given_up > 100 // seconds) == ([], False, True)


async def test_shedding_ends_for_a_trial_while_calls_are_refused(autojump_clock: MockClock) -> None:
    admission = Admission()
    clients = _Clients(admission, _queueing(1, 0.05))
    await clients.call(40, 10, waits=1.0, has_deadline=False)
    is_shedding = [admission.is_shedding]
    # Clients that wait as long as it takes follow; they are taken for impatient ones at first.
    patient = _Clients(admission, _queueing(1, 0.05))
    async with trio.open_nursery() as nursery:
        for _ in range(40):
            nursery.start_soon(partial(patient.call, 1, 60, waits=math.inf, has_deadline=False))
    assert (bool(patient.refused), patient.given_up) == (True, 0)
    assert [*is_shedding, admission.is_shedding] == [True, False]


async def test_trials_during_a_long_overload_are_rare(autojump_clock: MockClock) -> None:
    clients = _Clients(Admission(), _queueing(1, 0.05))
    await clients.call(40, 600, waits=1.0, has_deadline=True)
    assert len(clients.answered) >= 0.95 * 20 * 600


async def _refused(clients: _Clients, rate: float) -> int:
    before = len(clients.refused)
    await clients.call(rate, 5, waits=1.0, has_deadline=True)
    return len(clients.refused) - before


async def test_limit_that_is_set_while_shedding_replaces_it(autojump_clock: MockClock) -> None:
    limits = {"m": NO_LIMIT}
    admission = Admission(limit_of=lambda name: limits[name])
    clients = _Clients(admission, _queueing(1, 0.05))
    await clients.call(40, 5, waits=1.0, has_deadline=True)
    assert clients.refused
    limits["m"] = Limit(1, 1000)
    assert not await _refused(clients, rate=40)
    assert not admission.is_shedding
