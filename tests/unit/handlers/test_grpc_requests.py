from __future__ import annotations

import math
from types import SimpleNamespace
from typing import cast

import pytest
import trio
import trio.testing
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from ovmstrio.handlers.grpc.call import BlockingRequests, CallEndedError, HandlerContext
from ovmstrio.transport.grpc.call import Call


class _Call:
    def __init__(self, limit: int, failure: GRPCError | None = None) -> None:
        self.sent = 0
        self._limit = limit
        self._failure = failure

    async def recv_message(self) -> int | None:
        await trio.lowlevel.checkpoint()
        if self.sent < self._limit:
            self.sent += 1
            return self.sent
        if self._failure is not None:
            raise self._failure
        return None


async def test_at_most_four_requests_are_read_ahead() -> None:
    sender = _Call(100)
    requests = BlockingRequests(cast("Call", sender))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(requests.feed)
        await trio.testing.wait_all_tasks_blocked()
        assert sender.sent == 4
        assert await trio.to_thread.run_sync(next, requests) == 1
        await trio.testing.wait_all_tasks_blocked()
        assert sender.sent == 5
        nursery.cancel_scope.cancel()


async def test_a_failure_is_raised_after_the_requests_before_it() -> None:
    failure = GRPCError(Status.INVALID_ARGUMENT, "malformed")
    requests = BlockingRequests(cast("Call", _Call(2, failure)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(requests.feed)
        await trio.testing.wait_all_tasks_blocked()
        assert requests.failure is failure
        assert [next(requests), next(requests)] == [1, 2]
        for _ in range(2):
            with pytest.raises(CallEndedError):
                next(requests)


async def test_a_context_has_all_methods_of_a_servicer_context() -> None:
    grpc = pytest.importorskip("grpc")
    names = [name for name in dir(grpc.ServicerContext) if not name.startswith("_")]
    assert "set_compression" in names
    assert [name for name in names if not callable(getattr(HandlerContext, name, None))] == []
    call = SimpleNamespace(deadline=math.inf, metadata={})
    context = HandlerContext(cast("Call", call))
    context.set_compression(grpc.Compression.Gzip)
    context.disable_next_message_compression()
    assert context.auth_context().get(context.peer_identity_key()) is context.peer_identities() is None
