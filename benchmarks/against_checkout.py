"""Comparison of two checkouts: CPU time of the server per request, as median of alternating rounds.

python -m benchmarks.against_checkout OTHER, which has an environment in ``.venv``
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from benchmarks.requests import framed_infer_request
from tests.support import ir
from tests.support.bare_http2 import BareConnection
from tests.support.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__: list[str] = []

HERE: Final = Path(__file__).parents[1]
ROUNDS: Final = 7
CLIENTS: Final = 4
WARM_SECONDS: Final = 0.7
SECONDS: Final = 2.5
START_SECONDS: Final = 30

_HANDLER: Final = """
class Handler:
    def __init__(self, config): pass
    def handle_post(self, payload): return payload
"""
_SERVICE: Final = """
from ovmstrio.ext.ops import Op, WebService

class Same(Op):
    def preprocess(self, input_dicts, data_id=0, log_id=0):
        (given,) = input_dicts.values()
        return {"x": given["x"]}, False, None, ""

    def postprocess(self, input_dicts, fetch_data, data_id=0, log_id=0):
        return {"x": fetch_data["x"]}, None, ""

class Service(WebService):
    def get_pipeline_response(self, read_op):
        return Same(name="same", input_ops=[read_op])

service = Service(name="same")
service.prepare_pipeline_config("config.yml")
service.run_service()
"""
_CONFIG: Final = "{rpc_port: 0, http_port: 0, worker_num: 64, logging: {enabled: false}}"


class _Case(NamedTuple):
    """A benchmark case with its server and request; ``{port}`` is the called port, ``{other}`` an unused one.

    A body of bytes is sent over gRPC.  A ``tail`` follows a document, as tensors do in REST's binary
    extension.
    """

    name: str
    options: str
    path: str
    body: dict[str, Any] | bytes
    tail: bytes = b""


_NUMBERS: Final = {"inputs": [{"name": "b", "shape": [1, 10], "datatype": "FP32", "data": [0.5] * 10}]}
_IN_TAIL: Final = {"name": "b", "shape": [1, 10], "datatype": "FP32", "parameters": {"binary_data_size": 40}}
_BYTES: Final = {"inputs": [_IN_TAIL], "parameters": {"binary_data_output": True}}
_TEXT: Final = {"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": ["t"]}]}
_OPS: Final = "config.yml --service web_service.py --port {other} --rest_port {port}"
_CASES: Final = (
    _Case(
        "model, KServe v2 over gRPC",
        "--model_name m --model_path m --port {port} --rest_port {other}",
        "/inference.GRPCInferenceService/ModelInfer",
        framed_infer_request("m", "b", np.full((1, 10), 0.5, np.float32))[5:],
    ),
    _Case(
        "model, KServe v2 over REST",
        "--model_name m --model_path m --port {other} --rest_port {port}",
        "/v2/models/m/infer",
        _NUMBERS,
    ),
    _Case(
        "model, KServe v2 over REST, bytes",
        "--model_name m --model_path m --port {other} --rest_port {port}",
        "/v2/models/m/infer",
        _BYTES,
        bytes(40),
    ),
    _Case("handler, POST", "nucleus.yaml --port {port}", "/", {"a": 1}),
    _Case("Ops, Paddle's HTTP", _OPS, "/same/prediction", {"key": ["x"], "value": ["t"]}),
    _Case("Ops, KServe v2 over REST", _OPS, "/v2/models/same/infer", _TEXT),
)


def _write(folder: Path) -> None:
    (folder / "nucleus.yaml").write_text("type: python\npath: handler.py\nserve_port: 8080\n")
    (folder / "handler.py").write_text(_HANDLER)
    (folder / "web_service.py").write_text(_SERVICE)
    (folder / "config.yml").write_text(_CONFIG)
    ir.save(ir.dummy(), folder, "m")


@contextmanager
def _serving(checkout: Path, folder: Path, case: _Case) -> Iterator[tuple[int, int]]:
    """Serve a case and yield the process and its HTTP port after the first answered request."""
    other, port = free_ports(2)
    options = case.options.format(port=port, other=other).split()
    command = [str(checkout / ".venv" / "bin" / "ovms"), "serve", *options]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=folder, stdout=quiet, stderr=quiet) as process:
        try:
            _wait(port, case)
            yield process.pid, port
        finally:
            process.terminate()


def _wait(port: int, case: _Case) -> None:
    ends = time.monotonic() + START_SECONDS
    while time.monotonic() < ends:
        try:
            return _caller(port, case)()
        except (OSError, http.client.HTTPException):
            threading.Event().wait(0.1)
    sys.exit(f"{case.name}: the server does not answer")


def _caller(port: int, case: _Case) -> Callable[[], None]:
    """Connect, and return a function that sends one request."""
    body = case.body
    if isinstance(body, bytes):
        calls = BareConnection(port, timeout=START_SECONDS)

        def call() -> None:
            answer = calls.ask(case.path, body)
            if answer.status != "0":
                raise http.client.HTTPException(f"{case.name}: {answer.headers}")

        return call
    requests, document = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS), json.dumps(body).encode()
    headers = {"Inference-Header-Content-Length": str(len(document))} if case.tail else {}

    def request() -> None:
        requests.request("POST", case.path, document + case.tail, headers)
        answer = requests.getresponse()
        text = answer.read()
        if answer.status != http.client.OK:
            raise http.client.HTTPException(f"{case.name}: {answer.status} {text[:200]!r}")

    return request


def _ask_for(seconds: float, port: int, case: _Case) -> int:
    """Send requests from several clients for some time, and count the answers."""
    ends = time.monotonic() + seconds
    counts = [0] * CLIENTS

    def ask(number: int) -> None:
        once = _caller(port, case)
        while time.monotonic() < ends:
            once()
            counts[number] += 1

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return sum(counts)


def _microseconds(checkout: Path, folder: Path, case: _Case) -> float:
    with _serving(checkout, folder, case) as (process, port):
        _ask_for(WARM_SECONDS, port, case)
        before = _used(process)
        answers = _ask_for(SECONDS, port, case)
        return (_used(process) - before) / answers * 1e6


def _used(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(other: Path) -> None:
    """Print a row for each case."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder)
        print("| request | here, us of CPU | other, us of CPU | ratio |\n|---|---|---|---|")
        for case in _CASES:
            rounds = [[_microseconds(checkout, folder, case) for checkout in (HERE, other)] for _ in range(ROUNDS)]
            ours, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
            print(f"| {case.name} | {ours:.0f} | {theirs:.0f} | {ours / theirs:.2f} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
