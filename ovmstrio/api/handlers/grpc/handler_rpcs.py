"""The services of one project, each RPC bound to the handler's method of its name."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError

from ovmstrio.api.handlers.grpc.handler_context import HandlerContext
from ovmstrio.api.handlers.grpc.reply_bytes import WRONG_REPLY, serialised
from ovmstrio.api.handlers.grpc.request_iterators import AsyncRequests, BlockingRequests, Requests
from ovmstrio.core.errors import UserCodeError
from ovmstrio.runtimes.handlers.grpc import CallEndedError, WrongReplyError
from ovmstrio.runtimes.handlers.handler_code import HIDDEN
from ovmstrio.runtimes.handlers.handler_servable import HandlerServable
from ovmstrio.runtimes.handlers.http.responses import HTTPError
from ovmstrio.work.user_code.calls import is_async

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.servable import Service
    from ovmstrio.runtimes.handlers.grpc import GrpcProject, Rpc
    from ovmstrio.runtimes.handlers.handler import LoadedHandler
    from ovmstrio.wire.grpc.stream import Call

__all__ = ["handlers_of"]

_CALLBACK_SECONDS: Final = 2.0
"""How long the callbacks of a call that has ended are waited for."""
_CARDINALITIES: Final = {
    (each.client_streaming, each.server_streaming): each for each in Cardinality.__members__.values()
}


def handlers_of(service: Service) -> Mapping[str, Handler]:
    """Give what answers the calls of a loaded handler's services, by path."""
    if not isinstance(service, HandlerServable) or service.grpc is None:
        return {}
    rpcs = _HandlerRpcs(service.grpc)
    return {
        rpc.path: Handler(
            partial(rpcs.run, rpc),
            _CARDINALITIES[rpc.client_streaming, rpc.server_streaming],
            rpc.request_class,
            bytes,
        )
        for rpc in service.grpc.proto.rpcs
    }


class _HandlerRpcs:
    """The RPCs of one project, which its handler has a method for each of."""

    def __init__(self, project: GrpcProject) -> None:
        self._handler = project.handler
        self._limit = project.limit

    async def run(self, rpc: Rpc, call: Call) -> None:
        """Answer one call.

        Raises:
            GRPCError: the handler failed, ended the call with a status, or gave back something wrong; or a request
                cannot be read.
            TooManyRequests: as many calls as may be are in flight.
            ServerError: the handler met an error of the server's that is fit for callers.

        Ownership: the tasks that feed the handler with requests and look after its context.
        Cancellation: at any checkpoint; a generator is closed after the step that it is in.
        """
        self._limit.take()
        try:
            await _CallRun(rpc, call, self._handler).run()
        finally:
            self._limit.give_back()


class _CallRun:
    """One call on its way through the handler."""

    def __init__(self, rpc: Rpc, call: Call, handler: LoadedHandler) -> None:
        self._rpc = rpc
        self._call = call
        self._handler = handler
        self._context = HandlerContext(call)
        self._requests: Requests | None = None
        self._failure: Exception | None = None

    async def run(self) -> None:
        """Answer the call; see :meth:`_HandlerRpcs.run`."""
        payload = await self._payload()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_after_context)
            if self._requests is not None:
                nursery.start_soon(self._requests.feed)
            try:
                await self._answer(payload)
            except Exception as error:  # noqa: BLE001 - raised below, outside of the nursery and its group
                self._failure = error
            nursery.cancel_scope.cancel()
        await self._conclude()

    async def _payload(self) -> Any:
        if not self._rpc.client_streaming:
            return await self._call.recv_message()
        # A decorator may hide an async method behind a plain one.
        method = inspect.unwrap(self._handler.methods[self._rpc.name].call)
        self._requests = AsyncRequests(self._call) if is_async(method) else BlockingRequests(self._call)
        return self._requests

    async def _answer(self, payload: Any) -> None:
        arguments = {"payload": payload, "context": self._context}
        if self._rpc.server_streaming:
            await self._send_stream(arguments)
        else:
            reply = await self._handler.call(self._rpc.name, **arguments)
            if self._context.is_successful():
                await self._send(serialised(self._rpc, reply))

    async def _send_stream(self, arguments: dict[str, Any]) -> None:
        replies = await self._handler.iterate(self._rpc.name, partial(serialised, self._rpc), **arguments)
        try:
            async for reply in replies:
                await self._send(reply)
        finally:
            await replies.aclose()

    async def _send(self, data: bytes) -> None:
        await self._context.send_waiting_headers()
        await self._call.send_message(data)

    async def _look_after_context(self) -> None:
        try:
            await self._context.watch_headers()
            await trio.sleep_forever()
        finally:
            if self._requests is not None:
                self._requests.stop()
            callbacks = self._context.end()
            if callbacks is not None:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + _CALLBACK_SECONDS):
                    await trio.to_thread.run_sync(callbacks, abandon_on_cancel=True)

    async def _conclude(self) -> None:
        error = self._failure
        if self._requests is not None and self._requests.failure is not None:
            # The handler has met the end of its requests; this is why.
            raise self._requests.failure
        match error:
            case None:
                await self._context.conclude(None)
            case WrongReplyError():
                raise GRPCError(Status.INTERNAL, WRONG_REPLY) from error
            case CallEndedError():
                await self._context.conclude(GRPCError(Status.INTERNAL, HIDDEN))
            case UserCodeError() | HTTPError():
                await self._context.conclude(GRPCError(Status.INTERNAL, HIDDEN), error)
            case _:
                raise error
