"""Places of services and of the server: first come, first served, bounded, and never a deadlock."""

from __future__ import annotations

import math
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from ovmstrio.core.errors import Overloaded
from ovmstrio.core.limits import NO_LIMIT, Limit
from ovmstrio.core.request import InferRequest
from ovmstrio.dataplane.admission import Admission
from tests.support.waits import WAIT_SECONDS


def _admission(server: Limit = NO_LIMIT, **limits: Limit) -> Admission:
    return Admission(server, lambda name: limits.get(name, NO_LIMIT))


async def _hold(admission: Admission, name: str, held: list[int], number: int, done: trio.Event) -> None:
    with await admission.enter(name):
        held.append(number)
        await done.wait()


async def test_calls_wait_in_their_order_and_those_beyond_are_refused() -> None:
    """Two places and two who wait; the refusal has the numbers, and the queue moves one by one."""
    admission = _admission(m=Limit(2, 2))
    held: list[int] = []
    done = [trio.Event() for _ in range(4)]
    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(_hold, admission, "m", held, number, done[number])
            await trio.testing.wait_all_tasks_blocked()
        assert (held, admission.under_way("m"), admission.queued("m")) == ([0, 1], 2, 2)
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
    assert (admission.under_way("m"), admission.queued("m")) == (0, 0)


async def test_who_leaves_the_queue_leaves_no_gap() -> None:
    """A deadline or a client that goes, also in the moment of its turn, gives its place to the next."""
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
    assert (admission.under_way("m"), admission.queued("m")) == (0, 0)


async def test_the_guess_of_when_to_come_again_follows_what_calls_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four before it, at 3 s each, two at a time: 6 s and its own share."""
    admission = _admission(m=Limit(2, 2))
    now = 100.0
    monkeypatch.setattr("ovmstrio.dataplane.admission.perf_counter", lambda: now)
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


async def test_a_limit_of_the_server_is_for_all_services() -> None:
    """Those that wait for a service hold nothing of the server's, so that other services are called meanwhile."""
    admission = _admission(Limit(2, 1), slow=Limit(1, 5))
    held: list[int] = []
    done = trio.Event()
    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(_hold, admission, "slow", held, number, done)
            await trio.testing.wait_all_tasks_blocked()
        assert held == [0]
        with (
            await admission.enter("other"),
            pytest.raises(Overloaded, match=r"the server has 2 calls under way and 2 waiting, and may have 2 \(--"),
        ):
            await admission.enter("other")
        done.set()
    assert sorted(held) == [0, 1, 2]


async def test_a_nested_call_overtakes_those_that_wait_for_the_server() -> None:
    """A pipeline has the server's only place and calls a model; a direct call of that model waits for the server."""
    admission = _admission(Limit(1, 5), model=Limit(1, 5))
    held: list[int] = []
    done = trio.Event()
    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            with await admission.enter("pipeline"):
                nursery.start_soon(_hold, admission, "model", held, 1, done)
                await trio.testing.wait_all_tasks_blocked()
                assert held == []
                with await admission.enter("model", is_nested=True):
                    held.append(0)
            done.set()
    assert held == [0, 1]


@settings(deadline=None)
@given(
    st.integers(0, 3),
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(0, 4), max_size=3), st.sampled_from([math.inf, 3, 10])),
        max_size=14,
    ),
)
def test_no_mix_of_calls_waits_for_ever(most: int, each: list[int], calls: list[tuple[int, list[int], float]]) -> None:
    """Services call those behind them, some callers leave: limits hold, all end, and nothing is left."""
    limits = {str(number): Limit(value, 100) for number, value in enumerate(each)}
    admission = Admission(Limit(most, 100), lambda name: limits.get(name, NO_LIMIT))
    under_way = dict.fromkeys(limits, 0)
    directly = 0

    async def enter(number: int, steps: list[int], *, is_nested: bool) -> None:
        nonlocal directly
        name = str(number)
        with await admission.enter(name, is_nested=is_nested):
            under_way[name] += 1
            directly += not is_nested
            try:
                assert not each[number] or under_way[name] <= each[number]
                assert not most or directly <= most
                for further in steps:
                    await trio.sleep(1)
                    if number + further < len(each) and further:
                        await enter(number + further, steps[1:], is_nested=True)
            finally:
                under_way[name] -= 1
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
        assert (admission.under_way(name), admission.queued(name)) == (0, 0)

    async def take_all_places() -> None:
        with trio.fail_after(1):
            for _ in range(most):
                await admission.enter("another")

    trio.run(take_all_places, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_nodes_take_places_of_what_they_call() -> None:
    """Looking at what is leased takes none; each call does, and what it waited for is in its event."""
    admission = _admission(m=Limit(1, 0))

    class Servable:
        metadata = "metadata"

        async def infer(self, request: InferRequest) -> Any:
            assert admission.under_way("m") == 1
            with pytest.raises(Overloaded):
                await admission.enter("m", is_nested=True)
            return request.model_name

    class Lent:
        servable: Any = Servable()

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    async def lease(name: str, version: str = "", /) -> Any:
        del name, version
        return Lent()

    around: Any = admission.around(lease)
    with await around("m") as lent:
        assert (lent.servable.metadata, admission.under_way("m")) == ("metadata", 0)
        assert await lent.servable.infer(InferRequest("m")) == "m"
        assert admission.under_way("m") == 0
    with await around("free") as lent:
        assert isinstance(lent, Lent)
