"""Spans of handlers and Ops in processes."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.all_kinds import write_all_kinds
from tests.support.traced_servers import (
    GRAPH_BODY,
    PARENT,
    SPAN,
    TRACE,
    TRACED_HANDLER,
    TRACED_OPS,
    UNSAMPLED,
    request,
    traced,
)

if TYPE_CHECKING:
    from pathlib import Path


NODE = """
from opentelemetry import trace
from pyovms import Tensor

TRACER = trace.get_tracer("mine")

class OvmsPythonModel:
    def execute(self, inputs):
        trace.get_current_span().set_attribute("mine", 7)
        with TRACER.start_as_current_span("of the user"):
            return [Tensor("out", bytes(inputs[0]).upper())]
"""


@pytest.mark.parametrize("isolation", ["none", "process"])
async def test_spans_of_users_code_are_parts_of_the_node_that_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    """In a thread of the server, and in a process of its own."""
    config = write_all_kinds(tmp_path, node=NODE)
    async with traced(monkeypatch, config, settings={"python_isolation": isolation}) as (collector, server):
        answer = await request(server, "POST", "/v2/models/graph/infer", json=GRAPH_BODY, headers=PARENT)
        assert answer.status_code == 200, answer.text
        await request(server, "POST", "/v2/models/graph/infer", json=GRAPH_BODY, headers=UNSAMPLED)
    call = collector.named("POST /v2/models/graph/infer")
    (node,) = collector.below(call)
    above = node if isolation == "none" else collector.named("execute")
    own = collector.named("of the user")
    assert (own.parent_id, own.trace_id) == (above.span_id, TRACE)
    assert above.attributes["mine"] == 7
    if isolation == "process":
        assert above.parent_id == node.span_id


async def test_spans_of_handlers_and_of_ops_in_processes_are_parts_of_their_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code there sees a span of its process as the current one, and what fails it is told of both spans."""
    config = write_all_kinds(tmp_path, handler=TRACED_HANDLER, ops=TRACED_OPS)
    (tmp_path / "ops" / "config.yml").write_text("dag: {is_thread_op: false}\nlogging: {enabled: false}\n")
    settings = {"python_isolation": "process"}
    async with traced(monkeypatch, config, settings=settings) as (collector, server):
        for headers in (PARENT, UNSAMPLED):
            assert (await request(server, "POST", "/handler", json=[1, 2], headers=headers)).json() == 3
            asked = await request(
                server, "POST", "/ops/prediction", json={"key": ["x"], "value": ["1"]}, headers=headers
            )
            assert asked.json()["err_no"] == 0, asked.text
        failing = {"traceparent": f"00-{TRACE[::-1]}-{SPAN}-01"}
        bad = await request(server, "POST", "/ops/prediction", json={"key": ["no"], "value": ["1"]}, headers=failing)
        assert bad.json()["err_no"] != 0
    spans = {span.span_id: span for span in collector.spans}
    of_handler = collector.named("of the handler")
    assert spans[spans[of_handler.parent_id].parent_id] == collector.named("POST /handler")
    op, failed = sorted((span for span in collector.spans if span.name == "op count"), key=lambda span: span.failure)
    hooks = next(span for span in collector.below(op) if span.name == "hooks")
    assert [span.name for span in collector.below(hooks)] == ["of the op"]
    assert sorted(span.name for span in collector.below(op)) == ["hooks", "postprocess", "preprocess"]
    assert (op.failure, hooks.failure) == ("", "")
    assert "Raise_msg: x" in failed.failure
    (call,) = [span for span in collector.spans if span.span_id == failed.parent_id]
    assert (call.name, call.attributes["http.response.status_code"]) == ("POST /ops", 200)
    assert "Raise_msg: x" in call.failure
    assert "Raise_msg: x" in next(span.failure for span in collector.below(failed) if span.name == "hooks")


_SHOW = """
import os, sys, trio
from ovmstrio.server.traces import open_traces
import ovmstrio.server.life, ovmstrio.server.front_ends

async def main():
    async with open_traces() as traces:
        assert not traces.calls and not traces.requests and traces.recent is None

for variables in {}, {"OTEL_SERVICE_NAME": "x"}, {"OTEL_TRACES_EXPORTER": "none"}:
    os.environ.update(variables)
    trio.run(main)
    for name in variables:
        del os.environ[name]
print([name for name in sys.modules if name.partition(".")[0] == "opentelemetry"])
"""


def test_without_the_variables_opentelemetry_is_not_imported() -> None:
    """Nothing watches calls either, whatever other variables there are."""
    done = subprocess.run([sys.executable, "-c", _SHOW], capture_output=True, text=True, timeout=120, check=True)

    assert done.stdout.strip() == "[]", done.stdout
