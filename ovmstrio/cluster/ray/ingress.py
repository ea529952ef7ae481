"""Ingress of a cluster: answers requests for its own services and forwards others to their group.

::

    Ray proxy ── HTTP, gRPC ──> service? ──> own group: its server
                                         └──> other group: GroupLink, with the unchanged request
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import grpc
import orjson
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from ovmstrio.cluster.layout import shard_names
from ovmstrio.cluster.ray.grpc import GrpcResult
from ovmstrio.cluster.ray.grpc_services import CALLS, INDEX, READY, STREAM
from ovmstrio.cluster.ray.replica import GroupReplica, HttpParts
from ovmstrio.cluster.ray.request_streams import answer_stream, pass_stream
from ovmstrio.cluster.ray.routing import grpc_shard, grpc_target, http_shard, http_target, is_openai, plain_path
from ovmstrio.core.connection import UNKNOWN, Peer, socket_address
from ovmstrio.core.errors import NotReady, NotSupported, ServerError
from ovmstrio.core.http_messages import STATUSES_WITHOUT_BODY, HttpRequest
from ovmstrio.encoding.protobuf_wire import first_string_field
from ovmstrio.serving.ovms_errors import decompressed_body
from ovmstrio.transport.http.responses import body_too_large_error, error_response
from ovmstrio.util.truncation import cut

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from ray.serve.grpc_util import RayServegRPCContext, gRPCInputStream

    from ovmstrio.cluster.ray.links import GroupLink
    from ovmstrio.cluster.ray.request_streams import StreamReply
    from ovmstrio.core.http_messages import Headers

# Routing


# Ingress

log = structlog.get_logger(__name__)

_READY_SECONDS: Final = 2.0
_LISTS: Final = frozenset({"/v1/config", "/v2/models", "/v2/repository/index"})
_READY_PATHS: Final = frozenset({"/health", "/v2/health/ready"})
_LENGTH: Final = b"content-length"
_NO_STREAM: Final = "its sequences are sharded; use ModelInfer instead of a stream"
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


class ClusterIngress(GroupReplica):
    """Replica with the public endpoints; see :class:`GroupReplica`."""

    async def __call__(self, starlette_request: Request) -> Response:
        """Answer an HTTP request of Ray's proxy; cancelled by Ray if the client disconnects."""
        request = _request_of(starlette_request)
        try:
            body = await _body_of(starlette_request, self.server.http.max_body_bytes)
            return await self._answer(request._replace(body=body))
        except ClientDisconnect:
            raise
        except Exception as error:
            if not isinstance(error, ServerError):
                log.exception("request failed", path=request.target)
            return await self._refuse(request, error)

    async def _refuse(self, request: HttpRequest, error: Exception) -> Response:
        try:
            return _response(*(await self.trio.call(self.server.http.refuse, request, error))[:3])
        except NotReady:
            answer = error_response(error)
            return _response(answer.status, answer.headers, answer.content)

    async def _answer(self, request: HttpRequest) -> Response:
        owners = self.plan.owners
        if not owners:
            return await self._answer_here(request)
        path = plain_path(request)
        if path in _LISTS and request.method != "HEAD":
            return _response(*await self._merged_list(path, request))
        if path in _READY_PATHS:
            await self._check_groups()
        read = request
        if request.header("content-encoding") is not None and (is_openai(path) or self.plan.shards):
            limit = self.server.http.max_body_bytes
            read = request._replace(body=await self.trio.call(decompressed_body, request, limit))
        target = http_target(read, owners)
        group = owners.get(target.name, self.plan.group)
        if group == self.plan.group:
            return await self._answer_here(request)
        shard = http_shard(read, group, self.plan.shards.get(group, 1))
        if target.may_stream:
            return await self._stream_from(shard, request)
        return _response(*await self.links[shard].call("answer_http", request))

    async def _answer_here(self, request: HttpRequest) -> Response:
        head = await self.trio.call(self.server.http.answer, request)
        if head.pieces is None:
            return _response(*head[:3])
        return _streamed(head.status, head.headers, self.pieces(head))

    async def _stream_from(self, group: str, request: HttpRequest) -> Response:
        pieces = self.links[group].stream("stream_http", request)
        status, headers = await anext(pieces)
        return _streamed(status, headers, pieces)

    async def _merged_list(self, path: str, request: HttpRequest) -> HttpParts:
        # All shards of a group have the same services.
        firsts = {group: shard_names(group, self.plan.shards.get(group, 1))[0] for group in self.plan.owners.values()}
        groups = {
            group: self.links[first].call("answer_http", request)
            for group, first in firsts.items()
            if first in self.links
        }
        parts = dict(zip(groups, await asyncio.gather(*groups.values()), strict=True))
        parts[self.plan.group] = (await self.trio.call(self.server.http.answer, request))[:3]
        failed: HttpParts | None = next((part for part in parts.values() if part[0] != 200), None)  # noqa: PLR2004 - that of HTTP
        if failed is not None:
            return failed
        documents = {group: orjson.loads(body) for group, (_, _, body) in parts.items()}
        status, headers, _ = next(iter(parts.values()))
        return status, headers, orjson.dumps(_merge_lists(path, documents, self.plan.owners))

    async def _check_groups(self) -> None:
        reasons = await asyncio.gather(*map(_unready_reason, self.links.values()))
        for group, reason in zip(self.links, reasons, strict=True):
            if reason:
                raise NotReady(f'Server is not ready - group "{group}": {reason}')

    async def answer_call(self, path: str, data: bytes, context: RayServegRPCContext) -> GrpcResult:
        """Answer a unary gRPC call."""
        try:
            answer = await self._answer_call(path, data)
        except Exception as error:  # noqa: BLE001 - top level of one call
            answer = self.server.grpc.refuse(error, path)
        _set_status(answer, context)
        return answer

    async def _answer_call(self, path: str, data: bytes) -> GrpcResult:
        owners = self.plan.owners
        group = owners.get(grpc_target(path, data), self.plan.group) if owners else self.plan.group
        if group != self.plan.group:
            shard = grpc_shard(path, data, group, self.plan.shards.get(group, 1))
            answer = await self.links[shard].call("answer_grpc", path, data, math.inf)
            return GrpcResult(*answer)
        if owners and path == INDEX:
            raise NotSupported("with several groups, use HTTP: /v2/repository/index")
        if owners and path == READY:
            await self._check_groups()
        return await self.answer_grpc(path, data)

    async def ModelStreamInfer(  # noqa: N802 - the call's name
        self, requests: gRPCInputStream[bytes], grpc_context: RayServegRPCContext
    ) -> AsyncIterator[GrpcResult]:
        """Answer an inference stream with the group of its first request.

        Raises:
            StreamFailure: the status is not OK; Ray takes it from the context.
        """
        failure = None
        try:
            async with aclosing(self._replies(requests)) as replies:
                async for reply in replies:
                    if isinstance(reply, GrpcResult):
                        failure = reply
                    else:
                        yield GrpcResult(reply)
        except ServerError as error:
            failure = self.server.grpc.refuse(error, STREAM)
        if failure is not None:
            _set_status(failure, grpc_context)
            raise StreamFailure(failure.text)

    async def _replies(self, requests: gRPCInputStream[bytes]) -> AsyncGenerator[StreamReply]:
        first = await anext(requests, None)
        given = [] if first is None else [first]

        async def next_request() -> bytes | None:
            return given.pop() if given else await anext(requests, None)

        name = "" if first is None else first_string_field(first).decode(errors="replace")
        group = self.plan.owners.get(name, self.plan.group)
        if group == self.plan.group:
            replies = answer_stream(self.trio, self.server.grpc, next_request)
        elif group in self.plan.shards:
            raise NotSupported(f'"{cut(name, 80)}": {_NO_STREAM}')
        else:
            replies = pass_stream(self.links[group], next_request)
        async with aclosing(replies):
            async for reply in replies:
                yield reply


class StreamFailure(Exception):
    """A stream ended with an error status in the context."""


Answering = Callable[[ClusterIngress, bytes, "RayServegRPCContext"], Awaitable[GrpcResult]]


def _answering(path: str) -> Answering:
    """Return the method that Ray calls for a gRPC path, by its last segment."""

    async def answer(self: ClusterIngress, data: bytes, grpc_context: RayServegRPCContext) -> GrpcResult:
        return await self.answer_call(path, data, grpc_context)

    answer.__name__ = path.rpartition("/")[2]
    answer.__doc__ = f"Answer {path}."
    return answer


for _path in CALLS:
    setattr(ClusterIngress, _path.rpartition("/")[2], _answering(_path))


def _set_status(answer: GrpcResult, context: RayServegRPCContext) -> None:
    if answer.status:
        context.set_code(_CODES[answer.status])
        context.set_details(answer.text)
        context.set_trailing_metadata([*context.trailing_metadata(), *answer.trailers])


async def _unready_reason(link: GroupLink) -> str:
    try:
        async with asyncio.timeout(_READY_SECONDS):
            reason: str = await link.call("unready_reason")
    except TimeoutError:
        return f"no replica answered within {_READY_SECONDS:g} s"
    except NotReady as error:
        return error.message
    return reason


async def _body_of(starlette_request: Request, limit: int) -> bytes:
    """Read a request body of bounded size; raises PayloadTooLarge if the limit is exceeded."""
    content_length = starlette_request.headers.get("content-length", "")
    if content_length.isdecimal() and int(content_length) > limit:
        raise body_too_large_error(int(content_length), limit)
    pieces, size = [], 0
    async for piece in starlette_request.stream():
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            raise body_too_large_error(f"more than {limit}", limit)
    return b"".join(pieces)


def _request_of(starlette_request: Request) -> HttpRequest:
    scope = starlette_request.scope
    target = scope.get("raw_path") or scope["path"].encode()
    root = scope.get("root_path", "").encode()
    path = target.removeprefix(root).decode("latin-1") or "/"
    query = scope["query_string"].decode("latin-1")
    headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
    client = scope.get("client")
    peer = Peer(UNKNOWN if client is None else socket_address(socket.AF_INET, tuple(client)))
    target = f"{path}?{query}" if query else path
    return HttpRequest(scope["method"], "", query, headers, b"", peer, target)


def _response(status: int, headers: Headers, body: bytes) -> Response:
    response = Response(b"" if status in STATUSES_WITHOUT_BODY else body, status)
    response.raw_headers[:] = [*_encoded(headers), *(each for each in response.raw_headers if each[0] == _LENGTH)]
    return response


def _streamed(status: int, headers: Headers, pieces: AsyncIterator[bytes]) -> Response:
    response = StreamingResponse(pieces, status)
    response.raw_headers[:] = _encoded(headers)
    return response


def _encoded(headers: Headers) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def _merge_lists(path: str, documents: dict[str, Any], owners: dict[str, str]) -> Any:
    if path == "/v1/config":
        return {
            name: entry
            for group, document in documents.items()
            for name, entry in document.items()
            if owners.get(name) == group
        }
    rows = [
        row
        for group, document in documents.items()
        for row in (document["models"] if path == "/v2/models" else document)
        if owners.get(row["name"]) == group
    ]
    return {"models": rows} if path == "/v2/models" else rows
