from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from ovmstrio.cli.profile_tables import profile_tables
from ovmstrio.cli.speedscope import speedscope_document
from tests.support.all_kinds import HANDLER, NODE, OPS, write_all_kinds
from tests.support.traced_servers import (
    GRAPH_BODY,
    PARENT,
    SPAN,
    TRACE,
    TRACED_HANDLER,
    TRACED_OPS,
    UNSAMPLED,
    request,
    serving,
    traced,
)

TRACED_NODE = """
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
async def test_spans_of_python_nodes_are_children_of_their_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    config = write_all_kinds(tmp_path, node=TRACED_NODE)
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


async def test_spans_of_handlers_and_ops_in_processes_are_children_of_their_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_all_kinds(tmp_path, handler=TRACED_HANDLER, ops=TRACED_OPS)
    (tmp_path / "ops" / "config.yml").write_text("dag: {is_thread_op: false}\nlogging: {enabled: false}\n")
    settings = {"python_isolation": "process"}
    async with traced(monkeypatch, config, settings=settings) as (collector, server):
        for headers in (PARENT, UNSAMPLED):
            assert (await request(server, "POST", "/handler", json=[1, 2], headers=headers)).json() == 3
            answer = await request(
                server, "POST", "/ops/prediction", json={"key": ["x"], "value": ["1"]}, headers=headers
            )
            assert answer.json()["err_no"] == 0, answer.text
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


# Profiles


_SPEND_TIME = """
import time

def spend_time_in_{name}():
    ends = time.monotonic() + 0.1
    while time.monotonic() < ends:
        pass

"""


def _spending_time(code: str, name: str, statement: str) -> str:
    assert statement in code
    return _SPEND_TIME.format(name=name) + code.replace(statement, f"spend_time_in_{name}(); {statement}")


async def _while_called(calls: Sequence[Callable[[], Awaitable[Any]]], profile: Callable[[], Awaitable[Any]]) -> Any:
    is_over = trio.Event()

    async def call(make: Callable[[], Awaitable[Any]]) -> None:
        # A cancelled request would leave unsent data to the garbage collector.
        while not is_over.is_set():
            answer = await make()
            assert answer.status_code == 200, answer.text

    async with trio.open_nursery() as nursery:
        for each in calls:
            nursery.start_soon(call, each)
        document = await profile()
        is_over.set()
    return document


async def test_profile_shows_user_code_of_each_process(tmp_path: Path) -> None:
    node = _spending_time(NODE, "graph", "return [Tensor")
    handler = _spending_time(HANDLER, "handler", "return sum(")
    ops = _spending_time(OPS, "ops", 'return {"y":')
    config = write_all_kinds(tmp_path, node=node, handler=handler, ops=ops)
    (tmp_path / "ops" / "config.yml").write_text("dag: {is_thread_op: false}\nlogging: {enabled: false}\n")
    with trio.fail_after(120):
        async with serving(config, python_isolation="process") as server:
            post = partial(partial, request, server, "POST")
            calls = [
                post("/v2/models/graph/infer", json=GRAPH_BODY),
                post("/handler", json=[1]),
                post("/ops/prediction", json={"key": ["x"], "value": ["1"]}),
            ]
            answer = await _while_called(calls, post("/v2/profile", json={"seconds": 2, "rate": 100, "models": []}))
            assert answer.status_code == 200, answer.text
            document = answer.json()

    seen: dict[str, set[str]] = {}
    for threads in document["threads"]:
        names = seen.setdefault(threads.get("service", ""), set())
        names |= {document["frames"][number]["name"] for stack in threads["stacks"] for number in stack["frames"]}
    assert all(f"spend_time_in_{name}" in seen[name] for name in ("graph", "handler", "ops"))
    assert not {name for name in seen[""] if name.startswith("spend_time")}

    pids = {process["service"]: process["pid"] for process in document["processes"] if not process["problem"]}
    assert pids.keys() >= {"graph", "handler", "ops"}
    files = [profile["name"] for profile in speedscope_document(document)["profiles"]]
    titles = str([title for title, _ in profile_tables(document)])
    for service in ("graph", "handler", "ops"):
        assert any(name.startswith(f"process {pids[service]} of {service}: ") for name in files)
        assert f"process {pids[service]} of {service}: " in titles
