"""What Ray runs: a replica of a group, which is asked by other groups, on Ray's loop, and answers on trio's."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import trio
from ray.serve import get_replica_context

from ovmstrio.cluster.ray.autoscaling import WANTED
from ovmstrio.cluster.ray.group_server import GroupServer
from ovmstrio.cluster.ray.linked_services import answer_linked, describe_linked
from ovmstrio.cluster.ray.links import GroupLink
from ovmstrio.cluster.ray.request_streams import OpenStreams
from ovmstrio.cluster.ray.trio_guest import TrioGuest
from ovmstrio.core.errors import NotReady, ServerError
from ovmstrio.isolation.codec import encode_error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Collection

    from ray.serve.handle import DeploymentHandle

    from ovmstrio.cluster.ray.group_server import ReplicaPlan
    from ovmstrio.cluster.ray.grpc import GrpcAnswer
    from ovmstrio.cluster.ray.http import HttpHead
    from ovmstrio.cluster.ray.request_streams import StreamReply
    from ovmstrio.core.http import Headers, HttpRequest

__all__ = ["GroupReplica", "HttpParts"]

HttpParts = tuple[int, "Headers", bytes]


class GroupReplica:
    """One replica of a group; made and called on Ray's asyncio loop.

    Args:
        plan: what it does.
        handles: the ways to other groups, by their names.
        repeatable: the groups whose calls may be made once more when a replica was lost, as no code of users is there.

    Ownership: the trio side, which ends with the replica.

    Attributes:
        plan: what it does.
        links: the ways to other groups.
        trio: the loop of its server.
        server: answers there.
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
        """Ask another group; from the trio side."""
        return await self.trio.ask(self.links[group].answer, method, *arguments)

    async def check_health(self) -> None:
        """Tell Ray whether the replica can answer.

        Raises:
            NotReady: it cannot; Ray starts another one in its place.
        """
        if self.trio.has_ended:
            raise NotReady(f'the server of group "{self.plan.group}" has ended')

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Ray, every few seconds, what the number of replicas is to follow besides requests."""
        target = self.plan.target_waiting
        return {} if target is None else {WANTED: self.server.waiting / target}

    async def __del__(self) -> None:
        """End gently, when Ray has sent the last request."""
        await self.trio.aclose()

    # Of this group, for others of it and for other groups

    async def obstacle(self) -> str:
        """Tell why its services cannot be called, empty if they can."""
        readiness = self.server.plane.readiness()
        return "" if readiness.ready else readiness.reason

    async def infer_linked(self, data: bytes, seconds: float) -> tuple[bool, Any]:
        """Answer a call of a service of another group: whether it succeeded, and what came of it."""
        try:
            return True, await self.trio.call(answer_linked, self.server.plane, data, seconds)
        except ServerError as error:
            return False, encode_error(error)

    async def describe_linked(self, name: str) -> tuple[bool, Any]:
        """Tell a service of another group what one of this group takes."""
        try:
            return True, await self.trio.call(describe_linked, self.server.plane, name)
        except ServerError as error:
            return False, encode_error(error)

    async def answer_grpc(self, path: str, data: bytes, seconds: float = math.inf) -> GrpcAnswer:
        """Answer a call whose service is of this group."""
        return await self.trio.call(self.server.grpc.answer, path, data, seconds)

    async def open_stream(self) -> AsyncIterator[str | StreamReply]:
        """Answer a stream of inferences whose service is of this group: its key first, and then the replies."""
        async with aclosing(self._streams.open(self.trio, self.server.grpc)) as replies:
            async for reply in replies:
                yield reply

    async def push_to_stream(self, key: str, message: bytes | None, *, is_last: bool) -> bool:
        """Take a request of a stream, its end, or a sign of life; gives whether it is still open."""
        return await self._streams.push(key, message, is_last=is_last)

    async def answer_http(self, request: HttpRequest) -> HttpParts:
        """Answer a request whose service is of this group, with a whole body."""
        head = await self.trio.call(self.server.http.answer, request)
        if head.pieces is None:
            return head[:3]
        async with aclosing(self.pieces(head)) as pieces:
            return head.status, head.headers, b"".join([piece async for piece in pieces])

    async def stream_http(self, request: HttpRequest) -> AsyncIterator[Any]:
        """Answer as :meth:`answer_http`, with status and headers first, and then the pieces of the body."""
        head = await self.trio.call(self.server.http.answer, request)
        yield head.status, head.headers
        if head.pieces is None:
            yield head.body
            return
        async with aclosing(self.pieces(head)) as pieces:
            async for piece in pieces:
                yield piece

    async def pieces(self, head: HttpHead) -> AsyncGenerator[bytes]:
        """Give the pieces of a body that comes in pieces."""
        assert head.pieces is not None  # noqa: S101 - the caller has looked
        try:
            while True:
                try:
                    yield await self.trio.call(head.pieces.receive)
                except trio.EndOfChannel:
                    return
        finally:
            await asyncio.shield(self.trio.call(head.pieces.aclose))
