"""Replica of a group: an actor of Ray Serve on asyncio, with its server on trio."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import trio
from ray.serve import get_replica_context

from ovmstrio.cluster.ray.controller import DESIRED_REPLICAS
from ovmstrio.cluster.ray.group_server import GroupServer, ReplicaPlan
from ovmstrio.cluster.ray.linked_services import answer_linked, describe_linked
from ovmstrio.cluster.ray.links import GroupLink
from ovmstrio.cluster.ray.request_streams import OpenStreams
from ovmstrio.cluster.ray.trio_guest import TrioGuest
from ovmstrio.core.errors import NotReady, ServerError
from ovmstrio.isolation.messages import encode_error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Collection

    from ray.serve.handle import DeploymentHandle

    from ovmstrio.cluster.ray.grpc import GrpcResult
    from ovmstrio.cluster.ray.http import HttpHead
    from ovmstrio.cluster.ray.request_streams import StreamReply
    from ovmstrio.core.http_messages import Headers, HttpRequest

# Server


# Autoscaling


# Actor

HttpParts = tuple[int, "Headers", bytes]


class GroupReplica:
    """Replica of a group, created and called on Ray's asyncio loop.

    Args:
        repeatable: groups without user code, whose calls may be repeated after the loss of a replica.
    """

    async def __init__(  # type: ignore[misc]  # Ray waits for it
        self, plan: ReplicaPlan, handles: dict[str, DeploymentHandle], repeatable: Collection[str]
    ) -> None:
        self.plan = plan
        self.links = {
            name: GroupLink(name, handle, is_repeatable=name in repeatable) for name, handle in handles.items()
        }
        self._streams = OpenStreams(get_replica_context().replica_id.unique_id, plan.most_streams)
        self.trio = TrioGuest()
        self.server = GroupServer(plan, self._ask_group)
        await self.trio.start(self.server.run)

    async def _ask_group(self, group: str, method: str, *arguments: Any) -> Any:
        return await self.trio.ask(self.links[group].answer, method, *arguments)

    async def check_health(self) -> None:
        """Raise if the server has stopped; called by Ray.

        Raises:
            NotReady: the server has stopped; Ray starts another replica.
        """
        if self.trio.has_ended:
            raise NotReady(f'the server of group "{self.plan.group}" has stopped')

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return custom autoscaling metrics; called by Ray every few seconds."""
        target = self.plan.target_waiting
        return {} if target is None else {DESIRED_REPLICAS: self.server.waiting / target}

    async def __del__(self) -> None:
        """Drain after Ray has sent the last request."""
        await self.trio.aclose()

    async def unready_reason(self) -> str:
        """Return why the services are not ready, or an empty text."""
        readiness = self.server.plane.readiness()
        return "" if readiness.ready else readiness.reason

    async def infer_linked(self, data: bytes, seconds: float) -> tuple[bool, Any]:
        """Answer an inference call of another group: success flag, and result or error."""
        try:
            return True, await self.trio.call(answer_linked, self.server.plane, data, seconds)
        except ServerError as error:
            return False, encode_error(error)

    async def describe_linked(self, name: str) -> tuple[bool, Any]:
        """Return the metadata of a service to another group: success flag, and result or error."""
        try:
            return True, await self.trio.call(describe_linked, self.server.plane, name)
        except ServerError as error:
            return False, encode_error(error)

    async def answer_grpc(self, path: str, data: bytes, seconds: float = math.inf) -> GrpcResult:
        """Answer a gRPC call for a service of this group."""
        return await self.trio.call(self.server.grpc.answer, path, data, seconds)

    async def open_stream(self) -> AsyncIterator[str | StreamReply]:
        """Answer an inference stream for a service of this group: first its key, then the replies."""
        async with aclosing(self._streams.open(self.trio, self.server.grpc)) as replies:
            async for reply in replies:
                yield reply

    async def push_to_stream(self, key: str, message: bytes | None, *, is_last: bool) -> bool:
        """Add a request, the end or a heartbeat to a stream; return whether the stream is open."""
        return await self._streams.push(key, message, is_last=is_last)

    async def answer_http(self, request: HttpRequest) -> HttpParts:
        """Answer an HTTP request for a service of this group with a complete body."""
        head = await self.trio.call(self.server.http.answer, request)
        if head.pieces is None:
            return head[:3]
        async with aclosing(self.pieces(head)) as pieces:
            return head.status, head.headers, b"".join([piece async for piece in pieces])

    async def stream_http(self, request: HttpRequest) -> AsyncIterator[Any]:
        """Answer as :meth:`answer_http`, with status and headers first and then the chunks of the body."""
        head = await self.trio.call(self.server.http.answer, request)
        yield head.status, head.headers
        if head.pieces is None:
            yield head.body
            return
        async with aclosing(self.pieces(head)) as pieces:
            async for piece in pieces:
                yield piece

    async def pieces(self, head: HttpHead) -> AsyncGenerator[bytes]:
        """Yield the chunks of a streamed body."""
        assert head.pieces is not None  # noqa: S101 - checked by the caller
        try:
            while True:
                try:
                    yield await self.trio.call(head.pieces.receive)
                except trio.EndOfChannel:
                    return
        finally:
            await asyncio.shield(self.trio.call(head.pieces.aclose))
