from __future__ import annotations

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from ovmstrio.transport.send_budget import ByteBudget, ConnectionBudget, SendBudget


@given(st.lists(st.tuples(st.sampled_from(["wait", "cancel", "give back"]), st.integers(0, 150), st.integers(0, 9))))
@settings(max_examples=60, deadline=None)
def test_a_budget_is_granted_in_order_and_never_lost(steps: list[tuple[str, int, int]]) -> None:
    async def main() -> None:
        budget, held, waiting = ByteBudget(100), list[int](), list[tuple[trio.CancelScope, int]]()
        served = set[trio.CancelScope]()
        async with trio.open_nursery() as nursery:

            async def wait(scope: trio.CancelScope, size: int) -> None:
                with scope:
                    await budget.wait(size)
                    served.add(scope)
                    held.append(size)
                waiting.remove((scope, size))

            for step, size, which in steps:
                served.clear()
                if step == "wait":
                    waiting.append((trio.CancelScope(), size))
                    nursery.start_soon(wait, *waiting[-1])
                elif step == "cancel" and waiting:
                    waiting[which % len(waiting)][0].cancel()
                elif step == "give back" and held:
                    budget.release(held.pop(which % len(held)))
                line = [scope for scope, _ in waiting if not scope.cancel_called]
                await trio.testing.wait_all_tasks_blocked()
                # Those that are served together go on in any order, as trio likes.
                assert served == set(line[: len(served)])
                assert budget.held == sum(held)
                assert budget.held <= 100 or len([size for size in held if size]) == 1
                assert not waiting or budget.held + waiting[0][1] > 100
            nursery.cancel_scope.cancel()
        assert budget.held == sum(held)
        assert not budget.waiting

    trio.run(main)


async def test_a_share_is_bounded_by_itself_and_by_all(autojump_clock: MockClock) -> None:
    pending = SendBudget(150, 100)
    one, two = pending.share(), pending.share()
    assert one.take(100)
    assert not one.take(1)
    assert not two.take(60)
    with trio.move_on_after(1) as patience:
        await two.wait(60)
    assert patience.cancelled_caught
    assert (one.bytes, two.bytes, pending.budget.held) == (100, 0, 100)
    one.release(60)
    assert two.take(60)


async def test_a_cancelled_wait_releases_its_share(autojump_clock: MockClock) -> None:
    pending = SendBudget(100, 100)
    one, two = pending.share(), pending.share()
    one.add(90)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(two.wait, 50)
        await trio.testing.wait_all_tasks_blocked()
        assert two.bytes == 50
        nursery.cancel_scope.cancel()
    assert two.bytes == 0
    assert pending.budget.held == 90


async def test_an_answer_larger_than_the_share_is_sent_alone(autojump_clock: MockClock) -> None:
    share = SendBudget(10_000, 100).share()
    assert share.take(10)
    order = []
    async with trio.open_nursery() as nursery:

        async def wait(size: int) -> None:
            await share.wait(size)
            order.append(size)

        nursery.start_soon(wait, 500)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(wait, 20)
        await trio.testing.wait_all_tasks_blocked()
        assert order == []
        share.release(10)
        await trio.testing.wait_all_tasks_blocked()
        assert order == [500]
        share.release(500)
    assert order == [500, 20]


async def test_clients_without_pending_answers_go_first(autojump_clock: MockClock) -> None:
    pending = SendBudget(100, 90)
    hoarding, other = pending.share(), pending.share()
    hoarding.add(80)
    order = []
    async with trio.open_nursery() as nursery:

        async def wait(name: str, share: ConnectionBudget, size: int) -> None:
            await share.wait(size)
            order.append(name)

        third = pending.share()
        third.add(20)
        for name, share, size in [("hoarding", hoarding, 10), ("third", third, 30), ("first", other, 30)]:
            nursery.start_soon(wait, name, share, size)
            await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(wait, "second", pending.share(), 30)
        await trio.testing.wait_all_tasks_blocked()
        assert order == []
        hoarding.release(60)
        await trio.testing.wait_all_tasks_blocked()
        assert set(order) == {"first", "second"}
        other.close()
        await trio.testing.wait_all_tasks_blocked()
        assert order[2:] == ["hoarding"]
        hoarding.release(20)
    assert order[3:] == ["third"]


@pytest.mark.parametrize(("seconds", "patience"), [(60, 60), (0, float("inf")), (2, 2)])
async def test_patience_is_shorter_while_a_client_waits(
    autojump_clock: MockClock, seconds: float, patience: float
) -> None:
    pending = SendBudget(100, 100, seconds)
    assert pending.stall_timeout_seconds == patience
    pending.share().add(100)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pending.share().wait, 1)
        await trio.testing.wait_all_tasks_blocked()
        assert pending.stall_timeout_seconds == min(seconds or 5, 5)
        nursery.cancel_scope.cancel()
