"""Requests of one connection take their turns in the order in which they have come, service by service."""

from __future__ import annotations

import math

import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.arrivals import Arrival, Arrivals
from tests.support.waits import WAIT_SECONDS


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["turn", "turn", "settle", "cancel"]), st.integers(0, 5)),
        max_size=12,
    )
)
def test_turns_come_in_order_and_always_come(calls: list[tuple[str, str, int]]) -> None:
    """However long each takes to be named, be it settled or cancelled: none is overtaken, and none waits for ever."""
    taken: dict[str, list[int]] = {}

    async def serve(arrival: Arrival, name: str, deed: str, steps: int) -> None:
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
        arrivals = Arrivals()
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


async def test_a_request_waits_for_none_of_another_service() -> None:
    """One that stays on its way for long holds up those behind it only until it is known what it calls."""
    arrivals = Arrivals()
    slow, other, same = (arrivals.note(number) for number in (1, 2, 3))
    other.call("b")
    same.call("a")
    done: list[str] = []

    async def take(arrival: Arrival) -> None:
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
