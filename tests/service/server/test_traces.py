"""Calls through every door as spans that a collector of OpenTelemetry's receives."""

from __future__ import annotations

import json
import ssl
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
import trio
import trustme

from ovmstrio.server.plan import read_plan
from ovmstrio.server.settings import ServerSettings
from tests.support import ir
from tests.support.all_kinds import write_all_kinds
from tests.support.api_clients import triton_module
from tests.support.otlp import Collector, collecting
from tests.support.served_in_thread import ServedPlan, serving_plan
from tests.support.waits import WAIT_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

GRAPH_BODY = {"inputs": [{"name": "in", "shape": [1], "datatype": "BYTES", "data": ["x"]}]}
TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=x"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
_LOOPBACK = {"grpc_bind_address": "127.0.0.1", "rest_bind_address": "127.0.0.1", "trial_load": "off"}


@asynccontextmanager
async def serving(config: Path, **settings: Any) -> AsyncIterator[ServedPlan]:
    """Serve a configuration until the block ends, gently, so that all spans have been exported then."""
    plan = await read_plan(ServerSettings.model_validate({**_LOOPBACK, "config_path": config, **settings}))
    plan = replace(plan, grpc=("127.0.0.1:0",), rest=("127.0.0.1:0",))
    async with serving_plan(plan, drains=True) as server:
        with trio.fail_after(60):
            await server.plane.registry.wait_loaded()
        yield server


@asynccontextmanager
async def traced(
    monkeypatch: pytest.MonkeyPatch,
    config: Path,
    protocol: str = "http/protobuf",
    *,
    settings: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[tuple[Collector, ServedPlan]]:
    """Serve with traces; what was recorded is at the collector after the block."""
    async with collecting() as collector:
        for name, value in collector.environment(protocol, **(environment or {})).items():
            monkeypatch.setenv(name, value)
        async with serving(config, **(settings or {})) as server:
            yield collector, server


async def ask(server: ServedPlan, method: str, path: str, **options: Any) -> httpx.Response:
    """Make a call over REST."""
    async with httpx.AsyncClient(trust_env=False, timeout=WAIT_SECONDS) as client:
        return await client.request(method, f"http://{server.rest[0]}{path}", **options)


def infer_body(name: str = "b") -> dict[str, Any]:
    """Give an inference of the model in KServe's JSON."""
    return {"id": "r1", "inputs": [{"name": name, "shape": [1, 10], "datatype": "FP32", "data": [1.0] * 10}]}


def infer_over_grpc(address: str, headers: dict[str, str]) -> Any:
    """Infer with tritonclient."""
    triton = triton_module("grpc")
    with triton.InferenceServerClient(address) as client:
        given = triton.InferInput("b", [1, 10], "FP32")
        given.set_data_from_numpy(np.ones((1, 10), np.float32))
        return client.infer("model", [given], request_id="r2", headers=headers).as_numpy("a")


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
async def test_a_call_over_grpc_is_a_part_of_its_callers_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """Over either form of OTLP; the span has the conventions' names, and the server's own."""
    async with traced(monkeypatch, write_all_kinds(tmp_path), protocol) as (collector, server):
        answer = await trio.to_thread.run_sync(infer_over_grpc, server.grpc[0], PARENT)
        assert answer.tolist() == [[2.0] * 10]
    span = collector.named("inference.GRPCInferenceService/ModelInfer")
    assert (span.kind, span.trace_id, span.parent_id, span.state) == ("server", TRACE, SPAN, "vendor=x")
    assert (span.service, span.failure) == ("ovms", "")
    told = span.attributes
    assert told["rpc.system.name"] == "grpc"
    assert told["rpc.method"] == "inference.GRPCInferenceService/ModelInfer"
    assert told["rpc.response.status_code"] == "OK"
    assert told["ovmstrio.service.name"] == "model"
    assert told["ovmstrio.service.kind"] == "model"
    assert told["ovmstrio.request.id"] == "r2"
    assert told["client.address"] == "127.0.0.1"


async def test_calls_over_rest_of_every_protocol_are_parts_of_their_callers_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KServe, TensorFlow Serving, a handler's routes and a pipeline of Ops; statuses are those that clients got."""
    async with traced(monkeypatch, write_all_kinds(tmp_path)) as (collector, server):
        kserve = await ask(server, "POST", "/v2/models/model/infer", json=infer_body(), headers=PARENT)
        tensorflow = await ask(
            server, "POST", "/v1/models/model:predict", json={"instances": [[1.0] * 10]}, headers=PARENT
        )
        handler = await ask(server, "POST", "/handler", json=[1, 2], headers=PARENT)
        ops = await ask(server, "POST", "/ops/prediction", json={"key": ["x"], "value": ["1"]}, headers=PARENT)
        bad = await ask(server, "POST", "/v2/models/model/infer", json=infer_body("wrong"), headers=PARENT)
        assert [each.status_code for each in (kserve, tensorflow, handler, ops, bad)] == [200, 200, 200, 200, 400]
    spans = [span for span in collector.spans if span.kind == "server"]
    assert {span.trace_id for span in spans} == {TRACE}
    assert {span.parent_id for span in spans} == {SPAN}
    assert [(span.name, span.attributes["http.response.status_code"]) for span in spans] == [
        ("POST /v2/models/model/infer", 200),
        ("POST /v1/models/model:predict", 200),
        ("POST /handler", 200),
        ("POST /ops", 200),
        ("POST /v2/models/model/infer", 400),
    ]
    assert [span.attributes["ovmstrio.service.kind"] for span in spans[:4]] == [
        "model",
        "model",
        "handler",
        "op pipeline",
    ]
    assert spans[4].failure == ""
    assert spans[4].attributes["error.type"] == "InvalidRequest"


async def test_a_call_over_tls_is_told_as_one_and_a_proxy_says_what_came_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``url.scheme`` is what the client has asked for; nonsense in the header of proxies is not believed."""
    authority, pem = trustme.CA(), tmp_path / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(pem)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    path, tls = "/v2/models/model/infer", {"tls_cert": pem, "tls_key": pem}
    async with (
        traced(monkeypatch, write_all_kinds(tmp_path), settings=tls) as (collector, server),
        httpx.AsyncClient(trust_env=False, timeout=60, verify=context) as client,
    ):
        for said in ("", "http", "gopher"):
            headers = {"x-forwarded-proto": said} if said else {}
            answer = await client.post(f"https://{server.rest[0]}{path}", json=infer_body(), headers=headers)
            assert answer.status_code == 200
    calls = [span for span in collector.spans if span.kind == "server"]
    assert [span.attributes["url.scheme"] for span in calls] == ["https", "http", "https"]


async def test_a_call_without_a_parent_begins_a_trace_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks at recent traces finds the same ids as the collector."""
    async with traced(monkeypatch, write_all_kinds(tmp_path)) as (collector, server):
        await ask(server, "POST", "/v2/models/model/infer", json=infer_body())
        assert server.plane.traces is not None
        (kept,) = server.plane.traces.traces()
    span = collector.named("POST /v2/models/model/infer")
    assert span.parent_id == ""
    assert kept.trace_id == span.trace_id
    assert kept.root is not None
    assert kept.root.span_id == span.span_id
    assert kept.root.attributes["http.response.status_code"] == 200


async def test_without_the_variables_calls_are_recorded_while_somebody_looks(tmp_path: Path) -> None:
    """As the console's viewers do, and at no other time."""
    async with serving(write_all_kinds(tmp_path)) as server:
        traces = server.plane.traces
        assert traces is not None
        await ask(server, "POST", "/v2/models/model/infer", json=infer_body())
        assert traces.traces() == []
        with traces.watching():
            await ask(server, "POST", "/v2/models/dag/infer", json=infer_body())
        (trace,) = traces.traces()
        assert trace.summary()["name"] == "ModelInfer dag"
        assert traces.trace(trace.trace_id) == trace
    async with serving(tmp_path / "config.json", console="off") as server:
        assert server.plane.traces is None


@pytest.mark.parametrize("others", [{}, {"console_bodies": 100}], ids=["nobody", "the console"])
async def test_what_is_recorded_while_somebody_looks_is_so_at_both_doors(
    tmp_path: Path, others: dict[str, Any]
) -> None:
    """Whoever else is told of requests."""
    async with serving(write_all_kinds(tmp_path), **others) as server:
        traces = server.plane.traces
        assert traces is not None
        with traces.watching():
            await trio.to_thread.run_sync(infer_over_grpc, server.grpc[0], {})
            await ask(server, "POST", "/v2/models/model/infer", json=infer_body())
        assert len(traces.traces()) == 2


FAILING = """
class Handler:
    def handle_post(self, payload):
        raise RuntimeError("the cat is out")
"""


async def test_calls_that_are_not_sampled_are_recorded_if_they_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the ids that they had; what succeeds, or is the caller's mistake, is not."""
    config = write_all_kinds(tmp_path, handler=FAILING)
    async with traced(monkeypatch, config) as (collector, server):
        await ask(server, "POST", "/v2/models/model/infer", json=infer_body(), headers=UNSAMPLED)
        await ask(server, "POST", "/v2/models/model/infer", json=infer_body("wrong"), headers=UNSAMPLED)
        failed = await ask(server, "POST", "/handler", json=[1], headers=UNSAMPLED)
        assert failed.status_code == 500
    (span,) = collector.spans
    assert (span.name, span.trace_id, span.parent_id) == ("POST /handler", TRACE, SPAN)
    assert span.failure
    assert span.attributes["http.response.status_code"] == 500


async def test_a_share_of_the_calls_without_a_parent_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ratio of nothing records nothing, and a parent's decision counts more."""
    sampler = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}
    async with traced(monkeypatch, write_all_kinds(tmp_path), environment=sampler) as (collector, server):
        for _ in range(5):
            await ask(server, "POST", "/v2/models/model/infer", json=infer_body())
        await ask(server, "POST", "/v2/models/model/infer", json=infer_body(), headers=PARENT)
    (span,) = [each for each in collector.spans if each.kind == "server"]
    assert span.trace_id == TRACE


async def test_nodes_and_inferences_of_a_pipeline_are_parts_of_its_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call has a node, and the node an inference."""
    async with traced(monkeypatch, write_all_kinds(tmp_path)) as (collector, server):
        await ask(server, "POST", "/v2/models/dag/infer", json=infer_body(), headers=PARENT)
    call = collector.named("POST /v2/models/dag/infer")
    (node,) = collector.below(call)
    (inference,) = collector.below(node)
    assert (node.name, inference.name) == ("node node", "inference")
    assert inference.attributes["ovmstrio.inference.on"] == "loop"
    assert call.seconds >= node.seconds >= inference.seconds > 0


HANDLER = """
from opentelemetry import trace

class Handler:
    def handle_post(self, payload):
        with trace.get_tracer("mine").start_as_current_span("of the handler"):
            return sum(payload)
"""
OPS = """
from opentelemetry import trace
from ovmstrio.ops import Op, WebService


class Count(Op):
    def preprocess(self, input_dicts, data_id=0, log_id=0):
        (given,) = input_dicts.values()
        with trace.get_tracer("mine").start_as_current_span("of the op"):
            return {"y": "first " + given["x"]}, False, None, ""


class Service(WebService):
    def get_pipeline_response(self, read_op):
        return Count(name="count", input_ops=[read_op])


service = Service(name="ops")
service.prepare_pipeline_config("config.yml")
service.run_service()
"""


async def test_spans_of_handlers_and_of_ops_are_parts_of_their_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Op has a span, with its stages below it."""
    async with traced(monkeypatch, write_all_kinds(tmp_path, handler=HANDLER, ops=OPS)) as (collector, server):
        await ask(server, "POST", "/handler", json=[1, 2], headers=PARENT)
        await ask(server, "POST", "/ops/prediction", json={"key": ["x"], "value": ["1"]}, headers=PARENT)
        # What is not sampled is so for the code of users, too.
        await ask(server, "POST", "/handler", json=[1, 2], headers=UNSAMPLED)
        await ask(server, "POST", "/ops/prediction", json={"key": ["x"], "value": ["1"]}, headers=UNSAMPLED)
    assert collector.named("of the handler").parent_id == collector.named("POST /handler").span_id
    op = collector.named("op count")
    assert op.parent_id == collector.named("POST /ops").span_id
    assert {span.name for span in collector.below(op)} == {"of the op", "preprocess", "postprocess"}


async def test_a_batch_is_linked_to_the_calls_that_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a part of the first; each has waited for it, and the inference is a part of the batch."""
    ir.save(ir.dummy((-1, 10)), tmp_path / "models", "model")
    batching = {"max_batch_size": 2, "batch_timeout_ms": 20_000, "eager": False}
    entry = {"name": "model", "base_path": str(tmp_path / "models" / "model"), "batching": batching}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_config_list": [{"config": entry}]}))
    async with traced(monkeypatch, config) as (collector, server), trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(partial(ask, server, "POST", "/v2/models/model/infer", json=infer_body()))
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
async def test_another_server_is_told_of_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """Its call is a part of this server's call to it, which is a part of the caller's."""
    async with traced(monkeypatch, write_all_kinds(tmp_path)) as (collector, there):
        address = (there.grpc if scheme == "grpc" else there.rest)[0]
        entry = {"name": "far", "remote": f"{scheme}://{address}", "remote_name": "model"}
        config = tmp_path / "near.json"
        config.write_text(json.dumps({"model_config_list": [{"config": entry}]}))
        async with serving(config) as near:
            answer = await ask(near, "POST", "/v2/models/far/infer", json=infer_body(), headers=PARENT)
            assert answer.status_code == 200, answer.text
    call = collector.named("POST /v2/models/far/infer")
    (out,) = collector.below(call)
    assert (out.name, out.kind) == ("call model", "client")
    assert address in out.attributes["server.address"]
    (there_called,) = [span for span in collector.below(out) if span.kind == "server"]
    assert there_called.attributes["ovmstrio.service.name"] == "model"
    assert there_called.trace_id == TRACE


async def test_no_thread_of_the_exporters_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the server is theirs."""
    async with traced(monkeypatch, write_all_kinds(tmp_path)) as (_, server):
        await ask(server, "POST", "/v2/models/model/infer", json=infer_body())
        assert _exporting()
    assert not _exporting()


def _exporting() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("OtelBatch")]
