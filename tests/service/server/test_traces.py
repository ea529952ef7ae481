from __future__ import annotations

import json
import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trustme
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from structlog.testing import capture_logs

from ovmstrio.models.servable import ModelServable
from ovmstrio.telemetry.logs import configure_logs
from ovmstrio.telemetry.spans import sampler_from_environ, warn_unsupported_propagators
from ovmstrio.telemetry.trace_context import TraceParent
from ovmstrio.transport.grpc import call as stream
from tests.support import ir
from tests.support.all_kinds import OPS, write_all_kinds
from tests.support.api_clients import triton_module
from tests.support.otlp import Collector, Seen, collecting
from tests.support.served_in_thread import ServedPlan
from tests.support.system_servers import write_config
from tests.support.traced_servers import (
    GRAPH_BODY,
    PARENT,
    SPAN,
    TRACE,
    TRACED_HANDLER,
    TRACED_OPS,
    UNSAMPLED,
    infer_body,
    infer_over_grpc,
    request,
    serving,
    traced,
)
from tests.support.waits import WAIT_SECONDS

Tracing = Callable[..., AbstractAsyncContextManager[tuple[Collector, ServedPlan]]]
INFER = "/v2/models/model/infer"


@pytest.fixture
def tracing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracing:
    """Return a function that serves all kinds of services with a collector."""

    def serve(*, code: Mapping[str, str] | None = None, **options: Any) -> Any:
        return traced(monkeypatch, write_all_kinds(tmp_path, **(code or {})), **options)

    return serve


async def _post(server: ServedPlan, path: str = INFER, body: Any = None, **headers: str) -> httpx.Response:
    return await request(server, "POST", path, json=infer_body() if body is None else body, headers=headers)


async def test_grpc_call_is_a_span_of_the_trace_of_its_caller(tracing: Tracing) -> None:
    async with tracing() as (collector, server):
        answer = await trio.to_thread.run_sync(infer_over_grpc, server.grpc[0], PARENT)
        assert answer.tolist() == [[2.0] * 10]
    span = collector.named("inference.GRPCInferenceService/ModelInfer")
    assert (span.kind, span.trace_id, span.parent_id, span.state) == ("server", TRACE, SPAN, "vendor=x")
    assert (span.service, span.failure) == ("ovms", "")
    expected = {
        "rpc.system.name": "grpc",
        "rpc.method": "inference.GRPCInferenceService/ModelInfer",
        "rpc.response.status_code": "OK",
        "ovmstrio.service.name": "model",
        "ovmstrio.service.kind": "model",
        "ovmstrio.request.id": "r2",
        "client.address": "127.0.0.1",
    }
    assert {name: span.attributes[name] for name in expected} == expected


async def test_rest_calls_of_all_protocols_are_spans_of_the_traces_of_their_callers(tracing: Tracing) -> None:
    async with tracing() as (collector, server):
        answers = [
            await _post(server, **PARENT),
            await _post(server, "/v1/models/model:predict", {"instances": [[1.0] * 10]}, **PARENT),
            await _post(server, "/handler", [1, 2], **PARENT),
            await _post(server, "/ops/prediction", {"key": ["x"], "value": ["1"]}, **PARENT),
            await _post(server, INFER, infer_body("wrong"), **PARENT),
        ]
    spans = [span for span in collector.spans if span.kind == "server"]
    statuses = [answer.status_code for answer in answers]
    assert [span.attributes["http.response.status_code"] for span in spans] == statuses == [200, 200, 200, 200, 400]
    assert {(span.trace_id, span.parent_id) for span in spans} == {(TRACE, SPAN)}
    assert [(span.name, span.attributes["ovmstrio.service.kind"]) for span in spans[:4]] == [
        ("POST /v2/models/model/infer", "model"),
        ("POST /v1/models/model:predict", "model"),
        ("POST /handler", "handler"),
        ("POST /ops", "op pipeline"),
    ]
    assert (spans[4].name, spans[4].failure) == ("POST /v2/models/model/infer", "")
    assert spans[4].attributes["error.type"] == "InvalidRequest"


async def test_url_scheme_is_that_of_the_client_or_of_its_proxy(tracing: Tracing, tmp_path: Path) -> None:
    authority, pem = trustme.CA(), tmp_path / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(pem)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    path, tls = "/v2/models/model/infer", {"tls_cert": pem, "tls_key": pem}
    async with (
        tracing(settings=tls) as (collector, server),
        httpx.AsyncClient(trust_env=False, timeout=60, verify=context) as client,
    ):
        for scheme in ("", "http", "gopher"):
            headers = {"x-forwarded-proto": scheme} if scheme else {}
            answer = await client.post(f"https://{server.rest[0]}{path}", json=infer_body(), headers=headers)
            assert answer.status_code == 200
    calls = [span for span in collector.spans if span.kind == "server"]
    assert [span.attributes["url.scheme"] for span in calls] == ["https", "http", "https"]


async def test_call_without_parent_starts_a_trace_that_the_server_keeps(tracing: Tracing) -> None:
    async with tracing() as (collector, server):
        await _post(server)
        assert server.plane.traces is not None
        (kept,) = server.plane.traces.traces()
    span = collector.named("POST /v2/models/model/infer")
    assert span.parent_id == ""
    assert kept.trace_id == span.trace_id
    assert kept.root is not None
    assert kept.root.span_id == span.span_id
    assert kept.root.attributes["http.response.status_code"] == 200


FAILING = """
class Handler:
    def handle_post(self, payload):
        raise RuntimeError("the cat is out")
"""


async def test_unsampled_call_is_recorded_if_it_fails(tracing: Tracing) -> None:
    async with tracing(code={"handler": FAILING}) as (collector, server):
        await _post(server, **UNSAMPLED)
        await _post(server, INFER, infer_body("wrong"), **UNSAMPLED)
        failed = await _post(server, "/handler", [1], **UNSAMPLED)
        assert failed.status_code == 500
    (span,) = collector.spans
    assert (span.name, span.trace_id, span.parent_id) == ("POST /handler", TRACE, SPAN)
    assert span.failure
    assert span.attributes["http.response.status_code"] == 500


async def test_pipeline_call_has_spans_of_its_nodes_and_inferences(tracing: Tracing) -> None:
    async with tracing() as (collector, server):
        await _post(server, "/v2/models/dag/infer", **PARENT)
    call = collector.named("POST /v2/models/dag/infer")
    (node,) = collector.below(call)
    (inference,) = collector.below(node)
    assert (node.name, inference.name) == ("node node", "inference")
    assert inference.attributes["ovmstrio.inference.on"] == "loop"
    assert call.seconds >= node.seconds >= inference.seconds > 0


async def test_spans_of_handlers_and_ops_are_children_of_their_calls(tracing: Tracing) -> None:
    async with tracing(code={"handler": TRACED_HANDLER, "ops": TRACED_OPS}) as (collector, server):
        await _post(server, "/handler", [1, 2], **PARENT)
        await _post(server, "/ops/prediction", {"key": ["x"], "value": ["1"]}, **PARENT)
        # Spans of user code in unsampled calls are not sampled either.
        await _post(server, "/handler", [1, 2], **UNSAMPLED)
        await _post(server, "/ops/prediction", {"key": ["x"], "value": ["1"]}, **UNSAMPLED)
    assert collector.named("of the handler").parent_id == collector.named("POST /handler").span_id
    op = collector.named("op count")
    assert op.parent_id == collector.named("POST /ops").span_id
    assert {span.name for span in collector.below(op)} == {"of the op", "preprocess", "postprocess"}


async def test_batch_is_linked_to_its_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ir.save(ir.dummy((-1, 10)), tmp_path / "models", "model")
    batching = {"max_batch_size": 2, "batch_timeout_ms": 20_000, "eager": False}
    entry = {"name": "model", "base_path": str(tmp_path / "models" / "model"), "batching": batching}
    async with (
        traced(monkeypatch, write_config(tmp_path, entry)) as (collector, server),
        trio.open_nursery() as nursery,
    ):
        for _ in range(2):
            nursery.start_soon(_post, server)
    calls = [span for span in collector.spans if span.kind == "server"]
    batch = collector.named("batch")
    assert {*batch.links} == {call.span_id for call in calls}
    assert batch.parent_id in batch.links
    assert batch.attributes["ovmstrio.batch.size"] == 2
    waited = [span for span in collector.spans if span.name == "queue" and span.links]
    assert {span.parent_id for span in waited} == {call.span_id for call in calls}
    assert [span.links for span in waited] == [[batch.span_id]] * 2
    assert [span.name for span in collector.below(batch)] == ["inference"]


@pytest.mark.parametrize("scheme", ["grpc", "http"])
async def test_trace_continues_in_a_remote_server(tracing: Tracing, tmp_path: Path, scheme: str) -> None:
    async with tracing() as (collector, there):
        address = (there.grpc if scheme == "grpc" else there.rest)[0]
        entry = {"name": "far", "remote": f"{scheme}://{address}", "remote_name": "model"}
        async with serving(write_config(tmp_path, entry)) as near:
            answer = await _post(near, "/v2/models/far/infer", **PARENT)
            assert answer.status_code == 200, answer.text
    call = collector.named("POST /v2/models/far/infer")
    (out,) = collector.below(call)
    assert (out.name, out.kind) == ("call model", "client")
    assert address in out.attributes["server.address"]
    (there_called,) = [span for span in collector.below(out) if span.kind == "server"]
    assert there_called.attributes["ovmstrio.service.name"] == "model"
    assert there_called.trace_id == TRACE


async def test_exporter_threads_end_with_the_server(tracing: Tracing) -> None:
    def exporters() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("OtelBatch")]

    async with tracing() as (_, server):
        await _post(server)
        assert exporters()
    assert not exporters()


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ["ModelInfer dag", "ModelInfer model"]),
        ({"console_body_bytes": 100}, ["POST /v2/models/dag/infer", "inference.GRPCInferenceService/ModelInfer"]),
    ],
)
async def test_calls_are_recorded_without_exporter_while_they_are_watched(
    tmp_path: Path, settings: dict[str, Any], names: list[str]
) -> None:
    async with serving(write_all_kinds(tmp_path), **settings) as server:
        traces = server.plane.traces
        assert traces is not None
        await _post(server)
        assert traces.traces() == []
        with traces.watching():
            await trio.to_thread.run_sync(infer_over_grpc, server.grpc[0], {})
            await _post(server, "/v2/models/dag/infer")
        recorded = traces.traces()
        assert sorted(str(trace.summary()["name"]) for trace in recorded) == names
        assert [traces.trace(trace.trace_id) for trace in recorded] == recorded


async def test_server_without_console_and_exporter_keeps_no_traces(tmp_path: Path) -> None:
    async with serving(write_all_kinds(tmp_path), console="off") as server:
        assert server.plane.traces is None


# Unsampled calls


NEVER = {"OTEL_TRACES_SAMPLER": "always_off"}


async def _fail(*_: object) -> Any:
    raise RuntimeError("the device failed")


async def test_failed_unsampled_call_is_exported_with_the_ids_of_its_log_line(
    tracing: Tracing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    configure_logs(fmt="json", path=path)
    monkeypatch.setattr(ModelServable, "infer", _fail)
    async with tracing(environment=NEVER) as (collector, server):
        with pytest.raises(triton_module("grpc").InferenceServerException, match="RuntimeError"):
            await trio.to_thread.run_sync(infer_over_grpc, server.grpc[0], {})
        failed = await _post(server)
        assert failed.status_code == 500
    over_grpc, over_rest = collector.spans
    assert over_grpc.name == "inference.GRPCInferenceService/ModelInfer"
    assert over_grpc.failure == over_rest.failure == "the device failed"
    attributes = over_grpc.attributes
    assert (attributes["client.address"], attributes["rpc.method"]) == ("127.0.0.1", over_grpc.name)
    assert attributes["rpc.response.status_code"] in ("UNKNOWN", "INTERNAL")
    assert attributes["rpc.request.size"] > 0
    assert over_rest.attributes["http.response.status_code"] == 500

    lines = [
        json.loads(line)
        for line in path.read_text().splitlines()
        if '"event": "request failed"' in line and "request_id" in line
    ]
    ids = [(line["trace_id"], line["span_id"]) for line in lines]
    assert ids == [(each.trace_id, each.span_id) for each in (over_grpc, over_rest)]


async def test_deadline_that_passes_after_the_answer_is_the_status_of_the_span(
    tracing: Tracing, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = stream.Call._end  # noqa: SLF001 - no deadline passes between answer and end otherwise

    def too_late(self: stream.Call, _: object) -> None:
        ends(self, GRPCError(Status.DEADLINE_EXCEEDED, "too late"))

    async with tracing(environment=NEVER) as (collector, server):
        monkeypatch.setattr(stream.Call, "_end", too_late)
        with pytest.raises(triton_module("grpc").InferenceServerException, match="too late"):
            await trio.to_thread.run_sync(infer_over_grpc, server.grpc[0], {})
    (span,) = collector.spans
    assert span.attributes["rpc.response.status_code"] == "DEADLINE_EXCEEDED"
    assert span.attributes["ovmstrio.code"] == "OK"


# Environment variables


LOW, HIGH = 1, 2**64 - 1


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
async def test_exporter_is_configured_by_environment_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    async with collecting() as collector:
        own = f"http://{collector.grpc}" if protocol == "grpc" else f"http://{collector.http}/v1/traces"
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": own,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=cats,x-other=a%20b",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=tests,service.name=unheard",
            "OTEL_SERVICE_NAME": "heard",
            "OTEL_PROPAGATORS": "tracecontext,baggage",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "NO_PROXY": "127.0.0.1",
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        async with serving(write_all_kinds(tmp_path)) as server:
            await _post(server)
    assert collector.named("POST /v2/models/model/infer").service == "heard"
    assert collector.resource["deployment.environment"] == "tests"
    assert (collector.headers["x-tenant"], collector.headers["x-other"]) == ("cats", "a b")


async def test_otel_sdk_disabled_disables_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting() as collector:
        for name, value in {**collector.environment(), "OTEL_SDK_DISABLED": "TRUE"}.items():
            monkeypatch.setenv(name, value)
        async with serving(write_all_kinds(tmp_path)) as server:
            await _post(server)
    assert not collector.spans


@pytest.mark.parametrize(
    ("name", "without", "of_sampled", "of_unsampled"),
    [
        ("always_on", (True, True), (True, True), (True, True)),
        ("always_off", (False, False), (False, False), (False, False)),
        ("traceidratio", (True, False), (True, False), (True, False)),
        ("parentbased_always_on", (True, True), (True, True), (False, False)),
        ("parentbased_always_off", (False, False), (True, True), (False, False)),
        ("parentbased_traceidratio", (True, False), (True, True), (False, False)),
        ("", (True, True), (True, True), (False, False)),
        ("jaeger_remote", (True, True), (True, True), (False, False)),
    ],
)
def test_sampler_decides_by_parent_and_trace_id(
    name: str, without: tuple[bool, bool], of_sampled: tuple[bool, bool], of_unsampled: tuple[bool, bool]
) -> None:
    sampling = sampler_from_environ({"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": "0.5"})
    parents = (None, TraceParent(1, 1, is_sampled=True), TraceParent(1, 1, is_sampled=False))
    decided = [(sampling.records(LOW, parent), sampling.records(HIGH, parent)) for parent in parents]
    assert decided == [without, of_sampled, of_unsampled]


@pytest.mark.parametrize(
    ("value", "is_logged"),
    [
        ("", False),
        ("tracecontext", False),
        ("baggage, tracecontext", False),
        ("b3", True),
        ("tracecontext,b3multi", True),
        ("none", True),
        ("baggage", True),
    ],
)
def test_unsupported_propagators_are_logged(value: str, is_logged: bool) -> None:
    with capture_logs() as lines:
        warn_unsupported_propagators({"OTEL_PROPAGATORS": value})
    assert bool(lines) == is_logged


# Operators' questions

_RAISING: dict[str, str] = {
    "node": "class Broken(Exception): ...\n\n\nclass OvmsPythonModel:\n"
    "    def execute(self, inputs):\n        raise Broken('in the node')\n",
    "handler": "class Handler:\n    def handle_post(self, payload):\n        raise KeyError('in the handler')\n",
    "ops": OPS.replace("return {", "raise ZeroDivisionError('in the Op')\n        return {"),
}


@pytest.mark.parametrize("isolation", ["none", "process"])
@pytest.mark.parametrize("sampler", ["always_on", "always_off"])
async def test_error_type_is_the_type_of_the_exception_of_user_code(
    tracing: Tracing, isolation: str, sampler: str
) -> None:
    # Without this, structlog prints in threads of user code, whose output is captured.
    configure_logs()
    environment, settings = {"OTEL_TRACES_SAMPLER": sampler}, {"python_isolation": isolation}
    async with tracing(code=_RAISING, environment=environment, settings=settings) as (collector, server):
        await _post(server, "/v2/models/graph/infer", GRAPH_BODY)
        await _post(server, "/handler", [1])
        await _post(server, "/ops/prediction", {"key": ["x"], "value": ["1"]})
    types = {span.attributes["ovmstrio.service.name"]: span.attributes["error.type"] for span in _calls(collector)}
    # Graph failures have the status of client errors, as in OVMS, so that they are recorded if sampled.
    assert types.pop("graph", "Broken").endswith("Broken")
    assert ("graph" in [span.attributes["ovmstrio.service.name"] for span in _calls(collector)]) == (
        sampler == "always_on"
    )
    assert types == {"handler": "KeyError", "ops": "ZeroDivisionError"}
    inner = {span.attributes["error.type"] for span in collector.spans if "error.type" in span.attributes}
    assert not [each for each in inner if each.startswith("ovmstrio.")]


def _calls(collector: Collector) -> list[Seen]:
    return [span for span in collector.spans if span.kind == "server"]


async def test_routes_are_templates_without_names_of_models(tracing: Tracing) -> None:
    async with tracing() as (collector, server):
        await _post(server)
        await _post(server, "/v2/models/model/versions/1/infer")
        await _post(server, "/handler", [1])
    routes = [span.attributes["http.route"] for span in _calls(collector)]
    assert routes == ["/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer", "/handler"]


async def test_resource_tells_version_host_and_process_unless_the_environment_does(tracing: Tracing) -> None:
    environment = {"OTEL_RESOURCE_ATTRIBUTES": "host.name=shown,team=a"}
    async with tracing(environment=environment) as (collector, server):
        await _post(server)
    resource = collector.resource
    assert (resource["host.name"], resource["team"], resource["service.name"]) == ("shown", "a", "ovms")
    assert resource["service.version"] == version("ovmstrio")
    assert resource["process.pid"] == str(os.getpid())


async def test_call_of_a_dead_remote_has_a_failed_span_also_while_its_circuit_is_open(
    tracing: Tracing, tmp_path: Path
) -> None:
    (tmp_path / "near").mkdir()
    async with AsyncExitStack() as stack:
        collector, far = await stack.enter_async_context(tracing())
        address = far.grpc[0]
        entry = {"name": "far", "remote": f"grpc://{address}", "remote_name": "model", "max_attempts": 1}
        entry["breaker"] = {"failures": 1, "open_seconds": 3600}
        near = await stack.enter_async_context(serving(write_config(tmp_path / "near", entry)))
        far.drain()
        with trio.fail_after(WAIT_SECONDS):
            while (await _post(near, "/v2/models/far/infer")).is_success:  # noqa: ASYNC110 - another server drains
                await trio.sleep(0.01)
        assert (await _post(near, "/v2/models/far/infer")).status_code == 503
    failed = [span for span in _calls(collector) if span.failure]
    assert len(failed) >= 2
    for span in failed:
        assert span.attributes["error.type"] == "ovmstrio.core.errors.NotReady"
        (call,) = collector.below(span)
        assert (call.name, call.kind, call.attributes["server.address"]) == (
            "call model",
            "client",
            f"grpc://{address}",
        )
        assert call.failure


async def test_a_storm_of_failures_is_bounded_in_traces_and_log(
    tracing: Tracing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    configure_logs(fmt="json", path=path)
    monkeypatch.setattr(ModelServable, "infer", _fail)
    calls, limits = 200, {"trace_failures_per_second": 3, "log_failures_per_second": 5}
    began = time.monotonic()
    async with tracing(environment=NEVER, settings=limits) as (collector, server):
        async with httpx.AsyncClient(trust_env=False, timeout=WAIT_SECONDS) as client:
            for _ in range(calls):
                answer = await client.post(f"http://{server.rest[0]}{INFER}", json=infer_body())
                assert answer.status_code == 500
        seconds = int(time.monotonic() - began) + 2
    events = [json.loads(line) for line in path.read_text().splitlines()]
    # The front end logs the unexpected exception as well, without the service.
    for service in ("model", ""):
        lines = [each for each in events if each["event"] == "request failed" and ("kind" in each) == bool(service)]
        left_out = [
            each["count"] for each in events if each["event"] == "failures not logged" and each["service"] == service
        ]
        assert 5 <= len(lines) <= 5 * seconds
        assert len(lines) + sum(left_out) == calls
    assert 3 <= len(collector.spans) <= 3 * seconds
