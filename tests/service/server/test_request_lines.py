"""What is told of requests in lines: the access log of a server, and the ids of calls in its log."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import structlog
import trio

from ovmstrio.access.key_file import write_key_file
from ovmstrio.core.events import CallEvent, Door, current_event
from ovmstrio.core.tracing import current_span
from ovmstrio.observability.logs import configure_logs
from ovmstrio.observability.tracing.spans import QuietSpan
from tests.service.server.test_traces import (
    GRAPH_BODY,
    TRACE,
    UNSAMPLED,
    ask,
    infer_body,
    infer_over_grpc,
    serving,
    traced,
)
from tests.support.all_kinds import write_all_kinds
from tests.support.api_clients import triton_module
from tests.support.callers import bearer, entry_of

if TYPE_CHECKING:
    from pathlib import Path

LOGGING = """
import logging

class Handler:
    def handle_post(self, payload):
        logging.getLogger("mine").warning("of the user")
        return 1
"""
FAILING = """
class Handler:
    def handle_post(self, payload):
        raise RuntimeError("the cat is out")
"""


async def test_every_request_over_either_protocol_is_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Calls, what asks for nothing that is there, streams at their end, failures, and health."""
    config = write_all_kinds(tmp_path, handler=FAILING)
    async with serving(config, access_log="json") as server:
        await ask(server, "POST", "/v2/models/model/infer?key=secret", json=infer_body())
        await ask(server, "POST", "/v2/models/nobody/infer", json=infer_body())
        await ask(server, "GET", "/v2/health/live")
        await ask(server, "POST", "/handler", json=[1])
        await ask(server, "POST", "/v2/models/graph/generate_stream", json=GRAPH_BODY)
        await trio.to_thread.run_sync(infer_over_grpc, server.grpc[0], {})
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]

    def shown(line: dict[str, Any]) -> tuple[Any, ...]:
        return line["protocol"], line["path"], line["status"], line.get("name")

    assert [shown(line) for line in lines] == [
        ("HTTP", "/v2/models/model/infer", 200, "model"),
        ("HTTP", "/v2/models/nobody/infer", 404, None),
        ("HTTP", "/v2/health/live", 200, None),
        ("HTTP", "/handler", 500, "handler"),
        ("HTTP", "/v2/models/graph/generate_stream", lines[4]["status"], lines[4].get("name")),
        ("gRPC", "/inference.GRPCInferenceService/ModelInfer", "OK", "model"),
    ]
    assert lines[0]["request_id"] == "r1"
    assert min(lines[0]["sent"], lines[0]["received"], lines[5]["sent"], lines[5]["received"]) > 0
    assert lines[5]["request_id"] == "r2"


def _ask_over_grpc(address: str) -> None:
    """Ask about a model, and call one, as a caller that may do the first alone."""
    triton = triton_module("grpc")
    with triton.InferenceServerClient(address) as client:
        assert client.get_model_metadata("model", headers=bearer("reader")).name == "model"
    with pytest.raises(triton.InferenceServerException, match="infer:model"):
        infer_over_grpc(address, bearer("reader"))


async def test_a_line_has_the_caller_whatever_became_of_its_request(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Over either protocol: questions and refusals, which are no calls."""
    keys = tmp_path / "keys.json"
    write_key_file(keys, [entry_of("reader", "read", "infer:other")])
    async with serving(write_all_kinds(tmp_path), access_log="json", keys_file=keys) as server:
        await trio.to_thread.run_sync(_ask_over_grpc, server.grpc[0])
        await ask(server, "GET", "/v2/models/model", headers=bearer("reader"))
        await ask(server, "GET", "/nowhere", headers=bearer("reader"))
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]

    assert [(line["protocol"], line["status"], line["caller"]) for line in lines] == [
        ("gRPC", "OK", "reader"),
        ("gRPC", "PERMISSION_DENIED", "reader"),
        ("HTTP", 200, "reader"),
        ("HTTP", 400, "reader"),
    ]


async def test_the_line_of_a_call_that_is_traced_has_the_id_of_its_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does whatever its code logs, though the call is not recorded."""
    config, path = write_all_kinds(tmp_path, handler=LOGGING), tmp_path / "log"
    configure_logs(level="DEBUG", fmt="json", path=path)
    async with traced(monkeypatch, config) as (_, server):
        await ask(server, "POST", "/v2/models/model/infer", json=infer_body(), headers=UNSAMPLED)
        await ask(server, "POST", "/handler", json=[1], headers=UNSAMPLED)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    told = [line for line in lines if line["event"] in ("request", "of the user")]

    assert [line["event"] for line in told] == ["request", "of the user", "request"]
    assert {line["trace_id"] for line in told} == {TRACE}
    assert told[0]["request_id"] == "r1"


def test_what_is_logged_in_a_call_has_its_ids(tmp_path: Path) -> None:
    """Those of the request and of the trace, whether it is recorded or not; nothing has them after it."""
    path = tmp_path / "log"
    configure_logs(fmt="json", path=path)
    log = structlog.get_logger("ovmstrio.tested")
    call, span = CallEvent("m", "1", "model", Door("KServe", "REST"), "ModelInfer", "r9"), QuietSpan(0xAB)
    before = current_event.set(call), current_span.set(span)
    log.info("within")
    current_event.reset(before[0])
    current_span.reset(before[1])
    log.info("behind")

    within, behind = (json.loads(line) for line in path.read_text().splitlines())
    assert (within["request_id"], within["trace_id"], within["span_id"]) == ("r9", span.trace_id, span.span_id)
    assert not {"request_id", "trace_id", "span_id"} & behind.keys()
