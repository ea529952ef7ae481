"""Tests of how requests come to handlers in threads."""

from __future__ import annotations

from typing import Any, cast

import pytest
import trio
import trio.testing
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from ovmstrio.runtimes.handlers.grpc.call_run import BlockingRequests
from ovmstrio.runtimes.handlers.grpc.ends import CallEndedError
from ovmstrio.wire.grpc.stream import Call


class Sender:
    """A call whose client sends the numbers below a limit, and then ends or fails."""

    def __init__(self, limit: int, failure: GRPCError | None = None) -> None:
        self.sent = 0
        self._limit = limit
        self._failure = failure

    async def recv_message(self) -> int | None:
        """Give the next number."""
        await trio.lowlevel.checkpoint()
        if self.sent < self._limit:
            self.sent += 1
            return self.sent
        if self._failure is not None:
            raise self._failure
        return None


def requests_of(sender: Sender) -> BlockingRequests:
    """Give the requests of a client."""
    return BlockingRequests(cast("Call", sender))


async def test_few_requests_are_read_ahead() -> None:
    """A request is read when a place is free: there are four, and taking a request frees one."""
    sender = Sender(100)
    requests = requests_of(sender)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(requests.feed)
        await trio.testing.wait_all_tasks_blocked()
        assert sender.sent == 4
        assert await trio.to_thread.run_sync(next, requests) == 1
        await trio.testing.wait_all_tasks_blocked()
        assert sender.sent == 5
        nursery.cancel_scope.cancel()


async def test_all_requests_come_in_their_order() -> None:
    """The iterator ends with the client's last request, and stays at its end."""
    requests = requests_of(Sender(50))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(requests.feed)
        taken: list[Any] = await trio.to_thread.run_sync(list, requests)
        assert taken == list(range(1, 51))
        assert await trio.to_thread.run_sync(list, requests) == []


async def test_a_failure_comes_behind_the_requests_before_it() -> None:
    """What could be read is given; then the call is over, and it is known why."""
    failure = GRPCError(Status.INVALID_ARGUMENT, "malformed")
    requests = requests_of(Sender(2, failure))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(requests.feed)
        await trio.testing.wait_all_tasks_blocked()
        assert requests.failure is failure
        assert [next(requests), next(requests)] == [1, 2]
        for _ in range(2):
            with pytest.raises(CallEndedError):
                next(requests)


async def test_a_stopped_call_has_no_more_requests() -> None:
    """A thread that waits for a request is let go at once."""
    requests = requests_of(Sender(0))
    async with trio.open_nursery() as nursery:

        async def take() -> None:
            with pytest.raises(CallEndedError):
                await trio.to_thread.run_sync(next, requests)

        nursery.start_soon(take)
        requests.stop()
