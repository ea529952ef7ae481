"""Calls that traces do not sample: nothing is made for those that succeed, and those that fail are told in full."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import trio
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from ovmstrio.core.events import WireRequest
from ovmstrio.observability.logs import configure_logs
from ovmstrio.observability.tracing.spans import QuietSpan
from ovmstrio.runtimes.models.model import ModelServable
from ovmstrio.wire.grpc import stream
from tests.service.server.test_traces import ask, infer_body, infer_over_grpc, traced
from tests.support.all_kinds import write_all_kinds
from tests.support.api_clients import triton_module

if TYPE_CHECKING:
    from pathlib import Path

NEVER = {"OTEL_TRACES_SAMPLER": "always_off"}


async def _fail(*_: object) -> Any:
    raise RuntimeError("the device is gone")


async def test_nothing_is_made_for_a_call_that_is_not_sampled_and_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a description of its request, nor a span, nor ids."""
    made: list[object] = []

    def describe(*given: Any) -> WireRequest:
        made.append(given)
        return WireRequest(*given)

    def span(*given: Any) -> QuietSpan:
        made.append(given)
        return QuietSpan(*given)

    monkeypatch.setattr(stream, "WireRequest", describe)
    monkeypatch.setattr("ovmstrio.observability.tracing.call_tracing.QuietSpan", span)
    async with traced(monkeypatch, write_all_kinds(tmp_path), environment=NEVER) as (collector, server):
        answer = await trio.to_thread.run_sync(infer_over_grpc, server.grpc[0], {})
    assert answer.tolist() == [[2.0] * 10]
    assert not made
    assert not collector.spans


async def test_one_that_fails_is_told_with_its_request_and_the_ids_that_its_log_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over gRPC and REST, though nobody knew of it before it had failed."""
    path = tmp_path / "log"
    configure_logs(fmt="json", path=path)
    monkeypatch.setattr(ModelServable, "infer", _fail)
    async with traced(monkeypatch, write_all_kinds(tmp_path), environment=NEVER) as (collector, server):
        with pytest.raises(triton_module("grpc").InferenceServerException, match="RuntimeError"):
            await trio.to_thread.run_sync(infer_over_grpc, server.grpc[0], {})
        failed = await ask(server, "POST", "/v2/models/model/infer", json=infer_body())
        assert failed.status_code == 500
    over_grpc, over_rest = collector.spans
    assert over_grpc.name == "inference.GRPCInferenceService/ModelInfer"
    assert over_grpc.failure == over_rest.failure == "the device is gone"
    told = over_grpc.attributes
    assert (told["client.address"], told["rpc.method"]) == ("127.0.0.1", over_grpc.name)
    assert told["rpc.response.status_code"] in ("UNKNOWN", "INTERNAL")
    assert told["rpc.request.size"] > 0
    assert over_rest.attributes["http.response.status_code"] == 500

    lines = [
        json.loads(line)
        for line in path.read_text().splitlines()
        if '"event": "request failed"' in line and "request_id" in line
    ]
    ids = [(line["trace_id"], line["span_id"]) for line in lines]
    assert ids == [(each.trace_id, each.span_id) for each in (over_grpc, over_rest)]


async def test_an_answer_that_comes_too_late_is_a_failure_of_a_call_that_has_succeeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status says so; the call itself had ended well."""
    ends = stream.Call._end  # noqa: SLF001 - no deadline passes between answer and end otherwise

    def too_late(self: stream.Call, _: object) -> None:
        ends(self, GRPCError(Status.DEADLINE_EXCEEDED, "too late"))

    async with traced(monkeypatch, write_all_kinds(tmp_path), environment=NEVER) as (collector, server):
        monkeypatch.setattr(stream.Call, "_end", too_late)
        with pytest.raises(triton_module("grpc").InferenceServerException, match="too late"):
            await trio.to_thread.run_sync(infer_over_grpc, server.grpc[0], {})
    (span,) = collector.spans
    assert span.attributes["rpc.response.status_code"] == "DEADLINE_EXCEEDED"
    assert span.attributes["ovmstrio.code"] == "OK"
