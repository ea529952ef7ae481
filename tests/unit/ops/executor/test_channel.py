from __future__ import annotations

import math

import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from ovmstrio.runtimes.ops.executor.channel import Channel, Ticket
from tests.support.waits import WAIT_SECONDS


async def enter_all(channel: Channel, *data_ids: int) -> list[Ticket]:
    with trio.fail_after(WAIT_SECONDS):
        return [await channel.enter(data_id) for data_id in data_ids]


async def test_a_full_channel_blocks_all_but_forced_samples(autojump_clock: MockClock) -> None:
    channel = Channel(1, 1)
    first, second = await enter_all(channel, 1, 2)
    with trio.move_on_after(1) as scope:
        await channel.enter(3)
    assert scope.cancelled_caught
    forced = await channel.enter(0, is_forced=True)
    assert channel.size == 2
    first.leave()
    await forced.seated()
    forced.leave()
    await second.seated()
    (third,) = await enter_all(channel, 3)
    third.leave()
    third.leave()
    second.leave()
    assert channel.size == 0


@given(
    st.integers(0, 3),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.none() | st.integers(1, 6)), max_size=12),
)
def test_every_sample_gets_a_seat_or_leaves(
    capacity: int, seats: int, samples: list[tuple[int, int, int | None]]
) -> None:
    async def live() -> None:
        channel, seated, most = Channel(capacity, seats), 0, 0

        async def use(arrives: int, stays: int, gives_up_at: int | None, data_id: int) -> None:
            nonlocal seated, most
            await trio.sleep(arrives)
            with trio.move_on_after(math.inf if gives_up_at is None else gives_up_at - 0.5):
                ticket = await channel.enter(data_id)
                try:
                    await ticket.seated()
                    seated += 1
                    most = max(most, seated)
                    assert not capacity or channel.size <= capacity
                    try:
                        await trio.sleep(stays)
                    finally:
                        seated -= 1
                finally:
                    ticket.leave()

        with trio.fail_after(1000):
            async with trio.open_nursery() as nursery:
                for data_id, sample in enumerate(samples):
                    nursery.start_soon(use, *sample, data_id)
        await wait_all_tasks_blocked()
        assert most <= seats
        assert channel.size == 0
        for ticket in await enter_all(channel, *range(seats)):
            await ticket.seated()

    trio.run(live, clock=MockClock(autojump_threshold=0))
