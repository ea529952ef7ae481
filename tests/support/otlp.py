"""OpenTelemetry collector in this process, over HTTP and gRPC, built on the server's transports."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio
from grpclib.const import Cardinality, Handler
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from ovmstrio.core.callers import Permission
from ovmstrio.core.http_messages import HttpAnswer, HttpRequest
from ovmstrio.protocols.grpc_codec import Codec
from ovmstrio.serving.ovms_errors import OvmsRouteErrors
from ovmstrio.transport.grpc.call import Call
from ovmstrio.transport.grpc.server import GrpcServer
from ovmstrio.transport.http.router import Router, rule
from ovmstrio.transport.http.server import HttpFrontEnd
from ovmstrio.transport.listeners import open_listeners

_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_KINDS = ("", "internal", "server", "client")


@dataclass(frozen=True, slots=True)
class Seen:
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    links: list[str]
    events: list[str]
    state: str
    failure: str
    seconds: float
    service: str


@dataclass
class Collector:
    grpc: str = ""
    http: str = ""
    spans: list[Seen] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    resource: dict[str, str] = field(default_factory=dict)

    def take(self, data: bytes, headers: Iterable[tuple[str, str]]) -> None:
        self.headers.update(headers)
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            given = {each.key: each.value for each in resource.resource.attributes}
            named = {name: value.string_value or str(value.int_value) for name, value in given.items()}
            self.resource.update(named)
            for scope in resource.scope_spans:
                self.spans += [_seen(span, named["service.name"]) for span in scope.spans]

    def named(self, name: str) -> Seen:
        found = [span for span in self.spans if span.name == name]
        assert len(found) == 1, (name, [span.name for span in self.spans])
        return found[0]

    def below(self, parent: Seen) -> list[Seen]:
        return [span for span in self.spans if span.parent_id == parent.span_id]

    def environment(self, protocol: str = "http/protobuf", **more: str) -> Mapping[str, str]:
        address = f"http://{self.grpc if protocol == 'grpc' else self.http}"
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": address,
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "NO_PROXY": "127.0.0.1",
            **more,
        }


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()

    async def export_http(request: HttpRequest) -> HttpAnswer:
        packed = request.header("content-encoding") == "gzip"
        collector.take(gzip.decompress(request.body) if packed else request.body, request.headers)
        return HttpAnswer(200, (("content-type", "application/x-protobuf"),))

    async def export_grpc(call: Call) -> None:
        collector.take(await call.recv_message(is_decoded=False), call.state.head.headers)
        await call.send_message(memoryview(b""))

    http = HttpFrontEnd(
        ("127.0.0.1:0",),
        Router([rule("/v1/traces", "POST", export_http, is_hot=True, need=Permission.NOTHING)], OvmsRouteErrors()),
    )
    grpc = GrpcServer([_Collecting(Handler(export_grpc, Cardinality.UNARY_UNARY, bytes, bytes))], Codec())
    async with trio.open_nursery() as nursery, open_listeners(["127.0.0.1:0"], None) as listeners:
        (collector.http,) = await nursery.start(http.serve)
        (collector.grpc,) = await nursery.start(grpc.serve, listeners)
        yield collector
        nursery.cancel_scope.cancel()


class _Collecting:
    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def __mapping__(self) -> Mapping[str, Handler]:
        return {_EXPORT: self._handler}


def _seen(span: Any, service: str) -> Seen:
    attributes = {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
    return Seen(
        span.name,
        _KINDS[span.kind],
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        attributes,
        [link.span_id.hex() for link in span.links],
        [event.name for event in span.events],
        span.trace_state,
        span.status.message if span.status.code == Status.STATUS_CODE_ERROR else "",
        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        service,
    )
