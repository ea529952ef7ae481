"""Profiles have the threads of worker processes, of each by itself, whatever it works for."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from ovms_cli.profile_tables import profile_tables
from ovms_cli.speedscope import speedscope_document
from tests.support.all_kinds import write_all_kinds
from tests.support.traced_servers import GRAPH_BODY, request, serving

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

NODE = """
import time
from pyovms import Tensor

class OvmsPythonModel:
    def execute(self, inputs):
        spend_time_in_the_node()
        return [Tensor("out", b"x")]

def spend_time_in_the_node():
    ends = time.monotonic() + 0.1
    while time.monotonic() < ends:
        pass
"""
HANDLER = """
import time

def spend_time_in_the_handler():
    ends = time.monotonic() + 0.1
    while time.monotonic() < ends:
        pass

class Handler:
    def handle_post(self, payload):
        spend_time_in_the_handler()
        return 1
"""
OPS = """
import time
from ovmstrio.ops import Op, WebService


def spend_time_in_the_op():
    ends = time.monotonic() + 0.1
    while time.monotonic() < ends:
        pass


class Count(Op):
    def preprocess(self, input_dicts, data_id=0, log_id=0):
        spend_time_in_the_op()
        return {"y": "1"}, False, None, ""


class Service(WebService):
    def get_pipeline_response(self, read_op):
        return Count(name="count", input_ops=[read_op])


service = Service(name="ops")
service.prepare_pipeline_config("config.yml")
service.run_service()
"""


async def _while_called(calls: Sequence[Callable[[], Awaitable[Any]]], profile: Callable[[], Awaitable[Any]]) -> Any:
    """Take a profile while calls are made again and again."""
    is_over = trio.Event()

    async def call(make: Callable[[], Awaitable[Any]]) -> None:
        # Whoever is cancelled within a request leaves what was to be sent to the collector.
        while not is_over.is_set():
            answer = await make()
            assert answer.status_code == 200, answer.text

    async with trio.open_nursery() as nursery:
        for each in calls:
            nursery.start_soon(call, each)
        told = await profile()
        is_over.set()
    return told


async def test_code_of_users_in_processes_is_seen_where_it_runs(tmp_path: Path) -> None:
    """That of a Python node, a handler and an Op, in the document, the tables and the file."""
    config = write_all_kinds(tmp_path, node=NODE, handler=HANDLER, ops=OPS)
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
            told = answer.json()

    seen: dict[str, set[str]] = {}
    for threads in told["threads"]:
        names = seen.setdefault(threads.get("service", ""), set())
        names |= {told["frames"][number]["name"] for stack in threads["stacks"] for number in stack["frames"]}
    assert "spend_time_in_the_node" in seen["graph"]
    assert "spend_time_in_the_handler" in seen["handler"]
    assert "spend_time_in_the_op" in seen["ops"]
    assert not {name for name in seen[""] if name.startswith("spend_time")}

    pids = {process["service"]: process["pid"] for process in told["processes"] if not process["problem"]}
    assert pids.keys() >= {"graph", "handler", "ops"}
    files = [profile["name"] for profile in speedscope_document(told)["profiles"]]
    titles = str([title for title, _ in profile_tables(told)])
    for service in ("graph", "handler", "ops"):
        assert any(name.startswith(f"process {pids[service]} of {service}: ") for name in files)
        assert f"process {pids[service]} of {service}: " in titles
