"""Calls of other servers over gRPC, awaited on the event loop and ended at once when nobody wants the answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc
import trio

from ovmstrio.core.errors import DeadlineExceeded, NotReady, ServerError
from ovmstrio.core.tracing import part_of_call
from ovmstrio.protocol.status_errors import Unreachable, error_of_grpc

__all__ = ["Endpoints"]

_UNLIMITED: Final = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Endpoints:
    """Connections to servers that are each as good as the other; they take turns, and one that is gone is passed over.

    Args:
        addresses: ``host:port`` of each.
        timeout: the seconds that one call may take.
    """

    def __init__(self, addresses: Sequence[str], *, timeout: float) -> None:
        self._timeout = timeout
        self._channels = [(address, grpc.insecure_channel(address, options=_UNLIMITED)) for address in addresses]
        self._turns = itertools.count()

    def close(self) -> None:
        """Close the connections; calls that still wait fail."""
        for _, channel in self._channels:
            channel.close()

    async def call(self, method: str, request: Any, answer: Callable[[bytes], Any]) -> Any:
        """Call a unary method with a message and give what ``answer`` makes of the answer.

        Raises:
            Unreachable: no server could be reached.
            DeadlineExceeded: the server took too long.
            ServerError: what the server raised.

        Ownership: the message until it returns.

        Cancellation: at any time; the server is told.
        """
        first = next(self._turns)
        failures = []
        for turn in range(len(self._channels)):
            address, channel = self._channels[(first + turn) % len(self._channels)]
            told = {"rpc.system.name": "grpc", "rpc.method": method.lstrip("/"), "server.address": address}
            try:
                with part_of_call(f"call {method.lstrip('/')}", told, "client") as span:
                    headers = () if span is None else span.headers()
                    return await self._call_one(address, channel, method, request, answer, headers=headers)
            except Unreachable as failure:
                failures.append(failure.message)
        raise Unreachable("; ".join(failures))

    async def _call_one(
        self,
        address: str,
        channel: grpc.Channel,
        method: str,
        request: Any,
        answer: Callable[[bytes], Any],
        *,
        headers: Sequence[tuple[str, str]],
    ) -> Any:
        send = channel.unary_unary(
            method, request_serializer=type(request).SerializeToString, response_deserializer=answer
        )
        done, token = trio.Event(), trio.lowlevel.current_trio_token()
        future = send.future(request, timeout=self._timeout, metadata=headers)
        future.add_done_callback(lambda _: _tell(token, done))
        try:
            await done.wait()
            return future.result()
        except grpc.RpcError as failure:
            raise _error(address, failure, self._timeout) from None
        finally:
            future.cancel()


def _tell(token: trio.lowlevel.TrioToken, done: trio.Event) -> None:
    """Be called by a thread of the library, which may outlive the event loop."""
    try:
        token.run_sync_soon(done.set)
    except trio.RunFinishedError:
        return


def _error(address: str, failure: Any, timeout: float) -> ServerError:
    error = error_of_grpc(failure.code().name, failure.details())
    if isinstance(error, NotReady):
        return Unreachable(f"{address} cannot be used: {error.message}")
    if isinstance(error, DeadlineExceeded):
        return DeadlineExceeded(f"{address} did not answer within {timeout:g} s; 'timeout' of the Op sets how long")
    return error
