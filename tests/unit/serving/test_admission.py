from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import Overloaded, QueueTimeExceeded, TooManyRequests
from ovmstrio.core.limits import NO_LIMIT, Limit, LocalLimit
from ovmstrio.core.request import ArrivalOrder, ArrivalTicket, InferRequest
from ovmstrio.serving.admission import Admission
from ovmstrio.serving.data_plane import DataPlane
from ovmstrio.serving.interfaces import HANDLERS_HTTP
from tests.support.stub_registry import StubServable, add_versions, registry_of
from tests.support.waits import WAIT_SECONDS


def _admission(server: Limit = NO_LIMIT, **limits: Limit) -> Admission:
    return Admission(server, lambda name: limits.get(name, NO_LIMIT))


async def _hold(admission: Admission, name: str, held: list[int], number: int, done: trio.Event) -> None:
    with await admission.enter(name):
        held.append(number)
        await done.wait()


async def test_calls_wait_in_order_and_those_beyond_the_queue_are_refused() -> None:
    admission = _admission(m=Limit(2, 2))
    held: list[int] = []
    done = [trio.Event() for _ in range(4)]
    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(_hold, admission, "m", held, number, done[number])
            await trio.testing.wait_all_tasks_blocked()
        assert (held, admission.in_flight("m"), admission.queued("m")) == ([0, 1], 2, 2)
        with pytest.raises(Overloaded) as caught:
            await admission.enter("m")
        assert caught.value.message == (
            '"m" has 2 calls under way and 2 waiting, and may have 2 (max_concurrency) and 2 (max_queue); '
            "try again in 1 s"
        )
        assert caught.value.retry_after_seconds == 1
        for number in (1, 0):
            done[number].set()
            await trio.testing.wait_all_tasks_blocked()
        assert held == [0, 1, 2, 3]
        done[2].set()
        done[3].set()
    assert (admission.in_flight("m"), admission.queued("m")) == (0, 0)


async def test_cancelled_calls_leave_the_queue() -> None:
    admission = _admission(m=Limit(1, 5))
    held: list[int] = []
    done = trio.Event()
    async with trio.open_nursery() as nursery:
        first = await admission.enter("m")
        scopes = [trio.CancelScope() for _ in range(3)]

        async def wait(number: int) -> None:
            with scopes[number]:
                await _hold(admission, "m", held, number, done)

        for number in range(3):
            nursery.start_soon(wait, number)
            await trio.testing.wait_all_tasks_blocked()
        scopes[0].cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert admission.queued("m") == 2
        first.release()
        # Its turn has come, and it has not run yet.
        scopes[1].cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert held == [1, 2]
        done.set()
    assert (admission.in_flight("m"), admission.queued("m")) == (0, 0)


async def test_retry_after_follows_the_duration_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    admission = _admission(m=Limit(2, 2))
    now = 100.0
    monkeypatch.setattr("ovmstrio.serving.admission.perf_counter", lambda: now)
    place = await admission.enter("m")
    now += 3
    place.release()
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(_hold, admission, "m", [], 0, trio.Event())
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(Overloaded, match="try again in 5 s") as caught:
            await admission.enter("m")
        assert caught.value.retry_after_seconds == 5
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("server", "service", "own"),
    [
        pytest.param(NO_LIMIT, Limit(1, 9, 2.0), True, id="service"),
        pytest.param(Limit(0, 0, 2.0), Limit(1, 9), True, id="service, default of the server"),
        pytest.param(Limit(1, 9, 2.0), NO_LIMIT, False, id="server"),
        pytest.param(Limit(1, 9, 99.0), Limit(0, 0, 2.0), False, id="server, time of the service"),
    ],
)
async def test_call_is_refused_as_soon_as_it_cannot_start_within_the_queue_time(
    server: Limit, service: Limit, *, own: bool, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission = _admission(server, m=service)
    monkeypatch.setattr("ovmstrio.serving.admission.perf_counter", trio.current_time)
    for seconds in (1.0, 1.0):
        with await admission.enter("m"):
            await trio.sleep(seconds)
    whose = '"m"' if own else "the server"
    async with trio.open_nursery() as nursery:
        running = await admission.enter("m")
        started = []

        async def wait(number: int) -> None:
            (await admission.enter("m")).release()
            started.append((number, trio.current_time()))

        begun = trio.current_time()
        for number in range(2):
            nursery.start_soon(wait, number)
            await trio.testing.wait_all_tasks_blocked()
        # One runs and two wait, each for a second.
        with pytest.raises(QueueTimeExceeded) as caught:
            await admission.enter("m")
        assert trio.current_time() == begun
        assert caught.value.message == (
            f"{whose} has 1 calls under way and 2 waiting, so that a call would wait 3 s, and may wait 2 s "
            "(max_queue_time); try again in 3 s"
        )
        assert caught.value.retry_after_seconds == 3
        await trio.sleep(1.5)
        running.release()
    assert started == [(0, begun + 1.5), (1, begun + 1.5)]
    # The estimate of 1.1 seconds is wrong for this one: the time that the call has waited decides.
    with await admission.enter("m"):
        begun = trio.current_time()
        with pytest.raises(QueueTimeExceeded, match=r"could not start within 2 s \(max_queue_time\)"):
            await admission.enter("m")
        assert trio.current_time() == begun + 2
        assert admission.queued("m") == 0
    assert admission.in_flight("m") == 0
    with await admission.enter("m"):
        pass


async def test_call_that_may_not_wait_starts_where_there_is_a_place() -> None:
    admission = _admission(m=Limit(1, 9, 0))
    with await admission.enter("m"), pytest.raises(QueueTimeExceeded):
        await admission.enter("m")
    with await admission.enter("m"):
        pass


@settings(deadline=None)
@given(
    st.integers(0, 3),
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(0, 4), max_size=3), st.sampled_from([math.inf, 3, 10])),
        max_size=14,
    ),
)
def test_no_mix_of_calls_deadlocks(most: int, each: list[int], calls: list[tuple[int, list[int], float]]) -> None:
    limits = {str(number): Limit(value, 100) for number, value in enumerate(each)}
    admission = Admission(Limit(most, 100), lambda name: limits.get(name, NO_LIMIT))
    in_flight = dict.fromkeys(limits, 0)
    directly = 0

    async def enter(number: int, steps: list[int], *, is_nested: bool) -> None:
        nonlocal directly
        name = str(number)
        with await admission.enter(name, is_nested=is_nested):
            in_flight[name] += 1
            directly += not is_nested
            try:
                assert not each[number] or in_flight[name] <= each[number]
                assert not most or directly <= most
                for further in steps:
                    await trio.sleep(1)
                    if number + further < len(each) and further:
                        await enter(number + further, steps[1:], is_nested=True)
            finally:
                in_flight[name] -= 1
                directly -= not is_nested

    async def call(number: int, steps: list[int], patience: float) -> None:
        with trio.move_on_after(patience):
            await enter(number, steps, is_nested=False)

    async def run() -> None:
        with trio.fail_after(10_000):
            async with trio.open_nursery() as nursery:
                for number, steps, patience in calls:
                    nursery.start_soon(call, number, steps, patience)

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))
    for name in limits:
        assert (admission.in_flight(name), admission.queued(name)) == (0, 0)

    async def take_all_places() -> None:
        with trio.fail_after(1):
            for _ in range(most):
                await admission.enter("another")

    trio.run(take_all_places, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_calls_of_a_leased_servable_take_places() -> None:
    admission = _admission(m=Limit(1, 0))

    class _Servable:
        metadata = "metadata"

        async def infer(self, request: InferRequest) -> Any:
            assert admission.in_flight("m") == 1
            with pytest.raises(Overloaded):
                await admission.enter("m", is_nested=True)
            return request.model_name

    leased = SimpleNamespace(servable=_Servable())

    async def lease(_name: str, _version: str = "", /) -> Any:
        return nullcontext(leased)

    around: Any = admission.around(lease)
    with await around("m") as lent:
        assert (lent.servable.metadata, admission.in_flight("m")) == ("metadata", 0)
        assert await lent.servable.infer(InferRequest("m")) == "m"
        assert admission.in_flight("m") == 0
    with await around("free") as lent:
        assert lent is leased


async def test_limit_of_the_entry_applies_before_the_limit_of_the_service(
    nursery: trio.Nursery, tmp_path: Path
) -> None:
    limit = LocalLimit(1)

    async def load(spec: ModelSpec, version: int, _: Path) -> Any:
        servable: Any = StubServable(spec, version)
        servable.concurrency_limit = limit
        return servable

    registry = registry_of(load, poll_seconds=0)
    plane = DataPlane(registry)
    await nursery.start(registry.run)
    base = add_versions(tmp_path / "s", 1)
    await registry.apply([ModelSpec(name="s", base_path=base, max_concurrency=2, max_queue=0)])
    assert plane.has_limits()
    with await plane.call("s", HANDLERS_HTTP, "POST"):
        with pytest.raises(TooManyRequests):
            await plane.call("s", HANDLERS_HTTP, "POST")
        assert limit.in_flight == 1
    limit.maximum = 3
    with await plane.call("s", HANDLERS_HTTP, "POST"), await plane.call("s", HANDLERS_HTTP, "POST"):
        with pytest.raises(Overloaded, match="and may have 2"):
            await plane.call("s", HANDLERS_HTTP, "POST")
        assert limit.in_flight == 2
    assert limit.in_flight == 0


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["turn", "turn", "settle", "cancel"]), st.integers(0, 5)),
        max_size=12,
    )
)
def test_turns_of_a_connection_come_in_order_and_never_block(calls: list[tuple[str, str, int]]) -> None:
    taken: dict[str, list[int]] = {}

    async def serve(arrival: ArrivalTicket, name: str, deed: str, steps: int) -> None:
        for _ in range(steps):
            await trio.lowlevel.checkpoint()
        arrival.call(name)
        try:
            if deed == "settle":
                arrival.settle()
            else:
                with trio.move_on_after(0 if deed == "cancel" else math.inf):
                    await arrival.take_turn()
                    taken.setdefault(f"{name} first", []).append(arrival.number)
                    for _ in range(steps):
                        await trio.lowlevel.checkpoint()
                    await arrival.take_turn()
                    taken.setdefault(f"{name} again", []).append(arrival.number)
                await trio.lowlevel.checkpoint()
        finally:
            arrival.settle()

    async def run() -> None:
        arrivals = ArrivalOrder()
        with trio.fail_after(WAIT_SECONDS):
            async with trio.open_nursery() as nursery:
                for number, (name, deed, steps) in enumerate(calls, 1):
                    nursery.start_soon(serve, arrivals.note(number), name, deed, steps)
        assert not arrivals.waiting

    trio.run(run)
    for named, numbers in taken.items():
        assert numbers == sorted(numbers)
        name = named.split()[0]
        must = {number for number, (called, deed, _) in enumerate(calls, 1) if called == name and deed == "turn"}
        assert must <= set(numbers)


async def test_request_waits_only_for_earlier_ones_of_its_service() -> None:
    arrivals = ArrivalOrder()
    slow, other, same = (arrivals.note(number) for number in (1, 2, 3))
    other.call("b")
    same.call("a")
    done: list[str] = []

    async def take(arrival: ArrivalTicket) -> None:
        await arrival.take_turn()
        done.append(arrival.name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take, other)
        nursery.start_soon(take, same)
        await trio.testing.wait_all_tasks_blocked()
        assert done == []
        slow.call("a")
        await trio.testing.wait_all_tasks_blocked()
        assert done == ["b"]
        slow.settle()
        await trio.testing.wait_all_tasks_blocked()
        assert done == ["b", "a"]
