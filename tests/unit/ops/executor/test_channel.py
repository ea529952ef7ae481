from __future__ import annotations

import math

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from ovmstrio.runtimes.ops.executor.channel import Channel, Ticket
from tests.support.waits import WAIT_SECONDS


async def entered(channel: Channel, *data_ids: int) -> list[Ticket]:
    """Let samples into a channel that has room for them."""
    with trio.fail_after(WAIT_SECONDS):
        return [await channel.enter(data_id) for data_id in data_ids]


async def test_seats_go_to_the_oldest_requests() -> None:
    """Not to those that came first."""
    channel = Channel(0, 1)
    first, *others = await entered(channel, 7, 9, 3, 5)
    with trio.fail_after(WAIT_SECONDS):
        await first.seated()
        for ticket in (first, others[1], others[2], others[0]):
            await ticket.seated()
            ticket.leave()
    assert channel.size == 0


async def test_a_full_channel_lets_nobody_in_until_there_is_room(autojump_clock: MockClock) -> None:
    """But for those who are forced in, which are never held back."""
    channel = Channel(1, 1)
    first, second = await entered(channel, 1, 2)
    with trio.move_on_after(1) as scope:
        await channel.enter(3)
    assert scope.cancelled_caught
    forced = await channel.enter(0, is_forced=True)
    assert channel.size == 2
    first.leave()
    await forced.seated()
    forced.leave()
    await second.seated()
    (third,) = await entered(channel, 3)
    third.leave()
    third.leave()
    second.leave()
    assert channel.size == 0


@given(
    st.integers(0, 3),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.none() | st.integers(1, 6)), max_size=12),
)
def test_everyone_gets_a_seat_or_leaves(capacity: int, seats: int, samples: list[tuple[int, int, int | None]]) -> None:
    """Whoever comes and goes, as many sit and wait as may, and the channel is empty at the end."""

    async def live() -> None:
        channel, seated, most = Channel(capacity, seats), 0, 0

        async def use(comes: int, works: int, leaves: int | None, data_id: int) -> None:
            nonlocal seated, most
            await trio.sleep(comes)
            with trio.move_on_after(math.inf if leaves is None else leaves - 0.5):
                ticket = await channel.enter(data_id)
                try:
                    await ticket.seated()
                    seated += 1
                    most = max(most, seated)
                    assert not capacity or channel.size <= capacity
                    try:
                        await trio.sleep(works)
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
        for ticket in await entered(channel, *range(seats)):
            await ticket.seated()

    trio.run(live, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("seats", [1, 2])
async def test_seats_are_free_again_when_their_samples_leave(seats: int) -> None:
    """However often."""
    channel = Channel(1, seats)
    for data_id in range(5):
        (ticket,) = await entered(channel, data_id)
        with trio.fail_after(WAIT_SECONDS):
            await ticket.seated()
        ticket.leave()
    assert channel.size == 0
