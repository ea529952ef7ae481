"""The two directions of one ``ModelStreamInfer``: requests into the open stream, replies out of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from grpclib.exceptions import GRPCError, StreamTerminatedError

from ovmstrio.api.kserve.grpc.response_encoding import StreamInferResponse, encode_stream_response
from ovmstrio.core.request import StreamProblem

if TYPE_CHECKING:
    from ovmstrio.dataplane.open_stream import OpenStream
    from ovmstrio.wire.grpc.stream import Call

__all__ = ["exchange"]


async def exchange(call: Call, stream: OpenStream) -> None:
    """Receive requests and send replies until there are no more replies.

    Requests are not read ahead of the stream: one that takes none fills the client's flow-control window.

    Raises:
        GRPCError: a message of the client cannot be read, or a reply is too large.
        StreamTerminatedError: the call is over.

    Ownership: the task that receives, which has ended when this returns.
    Cancellation: at any checkpoint; a reply may have been sent in part.
    """
    failure: GRPCError | StreamTerminatedError | None = None

    async def receive() -> None:
        nonlocal failure
        try:
            async for request in call:
                await stream.send(request)
            stream.end()
        except trio.BrokenResourceError:
            # It has ended by itself, and the sender will see that.
            pass
        except GRPCError as error:
            failure = error
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        try:
            await _send_replies(call, stream)
        except (GRPCError, StreamTerminatedError) as error:
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _send_replies(call: Call, stream: OpenStream) -> None:
    async for reply in stream:
        if isinstance(reply, StreamProblem):
            data = encode_stream_response(StreamInferResponse(reply.message))
        else:
            data = encode_stream_response(StreamInferResponse("", reply))
        await call.send_message(data)
        stream.note_sent(len(data))
