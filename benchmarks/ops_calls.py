"""Ops: number of Python function calls for a request of one trivial Op or a chain, over each interface."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import sys
import tempfile
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import grpc
import trio

from benchmarks.report import Row
from ovmstrio.encoding.generated.inference import (
    ModelInferRequest,
    ModelInferRequestInferInputTensor,
    ModelInferRequestInferRequestedOutputTensor,
)
from ovmstrio.encoding.messages import METHOD, REQUEST, RESPONSE
from ovmstrio.ext.ops import Op, WebService
from ovmstrio.server.server import WorkerProcessContext, serve_plan
from ovmstrio.server.service_plan import plan_service, service_settings
from ovmstrio.telemetry.logs import configure_logs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ovmstrio.server.running import Running

__all__ = ["run"]

LENGTHS: Final = (1, 5)
WARM: Final = 50
CALLS: Final = 200
KSERVE: Final = "/inference.GRPCInferenceService/ModelInfer"
_TEXT: Final = "text"


class _Interface(NamedTuple):
    name: str
    goal: int | None


_INTERFACES: Final = (
    _Interface("KServe v2 over HTTP", 1420),
    _Interface("KServe v2 over gRPC", 600),
    _Interface("Paddle's HTTP", None),
    _Interface("Paddle's gRPC", None),
)


class _Trivial(Op):
    def preprocess(self, input_dicts: Any, data_id: int = 0, log_id: int = 0) -> Any:
        del data_id, log_id
        (given,) = input_dicts.values()
        return {"x": given["x"]}, False, None, ""

    def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        del input_dicts, data_id, log_id
        return {"x": fetch_data["x"]}, None, ""


class _Chain(WebService):
    length = 1

    def get_pipeline_response(self, read_op: Op) -> Op:
        op = read_op
        for number in range(self.length):
            op = _Trivial(name=f"op{number}", input_ops=[op])
        return op


def _calls(running: Running) -> Iterator[tuple[_Interface, Callable[[], None]]]:
    """Return a call for each interface, which exits on a wrong answer."""
    connection = http.client.HTTPConnection(running.rest[0])
    channel = grpc.insecure_channel(running.grpc[0])
    tensor = {"name": "x", "shape": [1], "datatype": "BYTES", "data": [_TEXT]}
    infer = ModelInferRequest(
        model_name="service",
        inputs=[ModelInferRequestInferInputTensor(name="x", datatype="BYTES", shape=[1])],
        outputs=[ModelInferRequestInferRequestedOutputTensor(name="x")],
        raw_input_contents=[len(_TEXT).to_bytes(4, "little") + _TEXT.encode()],
    )
    ours = REQUEST(key=["x"], value=[_TEXT]).SerializeToString()

    def post(path: str, body: dict[str, Any]) -> bytes:
        connection.request("POST", path, json.dumps(body))
        return connection.getresponse().read()

    asks: list[Callable[[], bytes]] = [
        lambda: post("/v2/models/service/infer", {"inputs": [tensor]}),
        lambda: post("/service/prediction", {"key": ["x"], "value": [_TEXT]}),
        lambda: bytes(channel.unary_unary(KSERVE)(bytes(infer), timeout=10)),
        lambda: bytes(channel.unary_unary(METHOD)(ours, timeout=10)),
    ]
    expected = [b'"data":["text"]', b'"value":["text"]', _TEXT.encode(), RESPONSE(value=[_TEXT]).SerializeToString()]
    order = (0, 2, 1, 3)
    for interface, index in zip(_INTERFACES, order, strict=True):

        def call(ask: Callable[[], bytes] = asks[index], part: bytes = expected[index]) -> None:
            if part not in (answer := ask()):
                sys.exit(f"the pipeline answered wrongly: {answer!r}")

        yield interface, call


def _measure(running: Running, counted: Callable[[], int]) -> list[tuple[_Interface, float]]:
    """Count the function calls of a request over each interface; the client's thread is not counted."""
    sys.setprofile(None)
    found = []
    for interface, call in _calls(running):
        for _ in range(WARM):
            call()
        before = counted()
        for _ in range(CALLS):
            call()
        found.append((interface, (counted() - before) / CALLS))
    return found


@contextmanager
def _counting() -> Iterator[Callable[[], int]]:
    """Count calls of Python functions in this thread and in all threads started within the block."""
    numbers = itertools.count()

    def note(_frame: object, event: str, _argument: object) -> None:
        if event == "call":
            next(numbers)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield numbers.__next__
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def _serve(counted: Callable[[], int], length: int) -> list[tuple[_Interface, float]]:
    service = _Chain(name="service")
    service.length = length
    settings = {"rpc_port": 0, "http_port": 0, "worker_num": 64, "logging": {"enabled": False}}
    service.prepare_pipeline_config(yml_dict=settings)
    plan = plan_service(service, service_settings({"grpc_bind_address": "127.0.0.1"}))
    measured = trio.Event()
    async with trio.open_nursery() as nursery:
        serve = partial(serve_plan, plan, WorkerProcessContext(wait_drain=measured.wait), handle_signals=False)
        running = await nursery.start(serve)
        found = await trio.to_thread.run_sync(_measure, running, counted)
        measured.set()
    return found


def run() -> list[Row]:
    """Count the calls in servers of this process; the goals apply to one Op."""
    here = Path.cwd()
    configure_logs()
    with tempfile.TemporaryDirectory() as folder, _counting() as counted:
        os.chdir(folder)
        try:
            found = [(length, *each) for length in LENGTHS for each in trio.run(_serve, counted, length)]
        finally:
            os.chdir(here)
    return [_row(length, interface, count) for length, interface, count in found]


def _row(length: int, interface: _Interface, count: float) -> Row:
    what = f"Python calls of a request, trivial Ops in threads: {length}, {interface.name}"
    goal = interface.goal if length == 1 else None
    met = goal is None or count <= goal
    return Row(what, count, "-" if goal is None else f"<= {goal}", met, f"mean of {CALLS} requests")
