"""Calls of Python functions that one more request makes in the server's thread, compared with a recorded baseline.

The number of calls does not depend on the speed of the machine, so a change of a few percent shows. It depends slightly
on timing, because a request that arrives while the event loop runs saves a turn of the loop. So clients pause before
each request until the loop is idle, and the median of several rounds is used.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import platform
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import structlog
import trio

from benchmarks.report import machine
from benchmarks.requests import framed_infer_request
from ovmstrio.config.specs import HandlerSpec, ModelSpec
from ovmstrio.core.limits import LocalLimit
from ovmstrio.core.request import InferRequest, InferResponse
from ovmstrio.core.tensor import BY_NAME, Tensor
from ovmstrio.encoding.messages import decode_request
from ovmstrio.handlers.handler_loading import open_handler
from ovmstrio.handlers.handler_service import HandlerService
from ovmstrio.handlers.models.library import open_models
from ovmstrio.inference.tuner import ModelTuner
from ovmstrio.models.loading import load_model
from ovmstrio.server.front_ends import GrpcFrontEnd, RestFrontEnd
from ovmstrio.serving.authorization import AuthorizingDataPlane, CallerRecorder
from ovmstrio.serving.data_plane import DataPlane
from ovmstrio.telemetry.access_log import RequestLog
from ovmstrio.telemetry.metrics import Metrics
from tests.support import ir
from tests.support.bare_http2 import BareConnection
from tests.support.callers import gate_of
from tests.support.projects import make_project
from tests.support.servables import network
from tests.support.stub_registry import Load, PassThrough, load_pass_through, open_plane_of, registry_of

__all__ = ["CASES", "compare_calls"]

MAX_RATIO: Final = 1.05
BASELINE: Final = Path(__file__).with_name("runs") / "calls.json"

_ROUNDS: Final = 7
_WARM_UP_REQUESTS: Final = 20
_FEW_REQUESTS: Final = 10
_MANY_REQUESTS: Final = 210
_STREAMS: Final = 10
"""gRPC calls sent at once, so that they share the turns of the event loop."""
_PAUSE_SECONDS: Final = 0.002
"""Before each request, so that the event loop waits for it."""
_TIMEOUT_SECONDS: Final = 60

_METHOD: Final = "/inference.GRPCInferenceService/ModelInfer"
_ONES: Final = np.ones((1, 10), np.float32)
_JSON: Final = b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[0.5,-1]}]}'
_BINARY_INPUT: Final = b'{"name":"x","shape":[1,2],"datatype":"FP32","parameters":{"binary_data_size":8}}'
_BINARY_HEAD: Final = b'{"parameters":{"binary_data_output":true},"inputs":[%b]}' % _BINARY_INPUT
_HANDLER: Final = "class Handler:\n    def handle_post(self, payload):\n        return payload\n"

Drive = Callable[[int], None]
"""Sends a number of requests and reads the responses; runs in a separate thread."""


# Counting


class _Counter:
    """Counter of Python function calls in the thread that enters :meth:`counting`."""

    def __init__(self, ignored_package: str = "") -> None:
        self.calls = 0
        self._ignored = f"/{ignored_package}/" if ignored_package else "\0"

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count from zero until the block ends."""
        self.calls = 0
        sys.setprofile(self._count)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _count(self, frame: Any, event: str, _: object) -> None:
        if event == "call" and self._ignored not in frame.f_code.co_filename:
            self.calls += 1


async def _calls_per_request(drive: Drive) -> float:
    """Return the calls of one more request: the difference between many requests and few, without the setup."""
    counter = _Counter()

    async def calls_of(requests: int) -> int:
        with counter.counting():
            await trio.to_thread.run_sync(drive, requests)
        return counter.calls

    await trio.to_thread.run_sync(drive, _WARM_UP_REQUESTS)
    rounds = [(await calls_of(_FEW_REQUESTS), await calls_of(_MANY_REQUESTS)) for _ in range(_ROUNDS)]
    return median(many - few for few, many in rounds) / (_MANY_REQUESTS - _FEW_REQUESTS)


# gRPC


async def _grpc_infer(folder: Path, batch: int) -> float:
    """Measure ModelInfer of a compiled model, with metrics and the request log."""
    spec = ModelSpec(name="m", base_path=ir.save(ir.dummy((batch, 10)), folder, "m"))
    registry = registry_of(load_model, poll_seconds=0)
    plane = DataPlane(registry, metrics=Metrics(), observers=(RequestLog(),))
    message = framed_infer_request("m", "b", _ONES)

    def drive(port: int, count: int) -> None:
        with BareConnection(port, timeout=_TIMEOUT_SECONDS) as client:
            for _ in range(0, count, _STREAMS):
                begun = [client.begin(_METHOD, message) for _ in range(_STREAMS)]
                time.sleep(_PAUSE_SECONDS)
                client.send(b"".join(data for _, data in begun))
                statuses = {client.wait(stream).status for stream, _ in begun}
                if statuses != {"0"}:
                    sys.exit(f"ModelInfer: expected gRPC status 0, got {', '.join(sorted(statuses))}")

    # Profiling slows the inference down, so the choice of thread or event loop is fixed.
    with patch.object(ModelTuner, "is_inline", lambda *_: True):
        async with trio.open_nursery() as nursery:
            await nursery.start(registry.run)
            await registry.apply([spec])
            addresses = await nursery.start(GrpcFrontEnd(plane, ["127.0.0.1:0"]).serve)
            calls = await _calls_per_request(partial(drive, int(addresses[0].rpartition(":")[2])))
            nursery.cancel_scope.cancel()
    return calls


# REST


class _ImmediateServable(PassThrough):
    """Servable that returns its input without a checkpoint."""

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer within the same turn of the event loop."""
        (given,) = request.inputs
        if given.contents is not None:
            values = np.array(given.contents.values, np.float32)
        else:
            values = np.frombuffer(request.raw_inputs[0] or b"", np.float32)
        output = Tensor(given.name, BY_NAME["FP32"], values.reshape(given.shape))
        return InferResponse(request.model_name, "1", [output], is_private=True)


async def _load_immediate(spec: ModelSpec, version: int, _: Path) -> _ImmediateServable:
    return _ImmediateServable(spec, version)


def _post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", *headers, f"Content-Length: {len(body)}", "\r\n"]
    return "\r\n".join(lines).encode() + body


def _drive_http(address: str, request: bytes, count: int) -> None:
    """Send a request a number of times in sequence on one connection."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=_TIMEOUT_SECONDS) as client:
        for _ in range(count):
            time.sleep(_PAUSE_SECONDS)
            client.sendall(request)
            head, _, body = client.recv(65536).partition(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200 "):
                sys.exit(f"REST: expected status 200, got {head.decode('latin-1').splitlines()[:1]}")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            while len(body) < length:
                body += client.recv(65536)


@asynccontextmanager
async def _serving_rest(plane: DataPlane, **options: Any) -> AsyncIterator[str]:
    """Serve a data plane over REST while the block lasts, and yield the address."""
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(RestFrontEnd(plane, ["127.0.0.1:0"], **options).serve)
        yield addresses[0]
        nursery.cancel_scope.cancel()


async def _rest_infer(folder: Path, load: Load, request: bytes, *, is_guarded: bool = False) -> float:
    registry = registry_of(load, poll_seconds=0)
    plane = AuthorizingDataPlane(registry, observers=(CallerRecorder(),)) if is_guarded else DataPlane(registry)
    options = {"gate": gate_of({"shop": "infer:echo"})} if is_guarded else {}
    (folder / "echo" / "1").mkdir(parents=True)
    async with trio.open_nursery() as nursery:
        await nursery.start(registry.run)
        await registry.apply([ModelSpec(name="echo", base_path=folder / "echo")])
        plane.begin_serving()
        async with _serving_rest(plane, **options) as address:
            calls = await _calls_per_request(partial(_drive_http, address, request))
        nursery.cancel_scope.cancel()
    return calls


def _infer_post(body: bytes = _JSON, *headers: str) -> bytes:
    return _post("/v2/models/echo/infer", body, *headers)


async def _rest_handler(folder: Path) -> float:
    """Measure a POST to a handler; its method runs in another thread, whose calls are not counted."""
    project = make_project(folder, _HANDLER)
    spec = HandlerSpec(name=project.name, base_path=project.directory, path=project.file)
    request = _post("/", b'{"a":1}', "Content-Type: application/json")
    async with open_models(project) as models, open_handler(project) as handler:
        servable = HandlerService(project.name, handler, LocalLimit(project.max_concurrency), None, models)
        servable.gone()
        async with (
            open_plane_of(spec, servable, lambda: "") as plane,
            _serving_rest(plane, root=project.name) as address,
        ):
            return await _calls_per_request(partial(_drive_http, address, request))


# Parts of a request


async def _network_infer(folder: Path, *, is_inline: bool) -> float:
    """Measure one inference without a server; calls of trio are ignored, as their number depends on timing."""
    compiled = network(ir.dummy(), folder)
    counter, counts = _Counter("trio"), []
    with patch.object(ModelTuner, "is_inline", lambda *_: is_inline):
        for _ in range(_WARM_UP_REQUESTS):
            with counter.counting():
                await compiled.infer([_ONES])
            counts.append(counter.calls)
    return float(median(counts))


async def _decode_empty_fields(_: Path) -> float:
    """Measure the decoding of a pipeline's request with 100,000 empty fields, which must not be read one by one."""
    counter = _Counter()
    with counter.counting():
        decode_request(b"\x0a\x00" * 100_000 + b"\x22\x03uci")
    return float(counter.calls)


CASES: Final[Mapping[str, Callable[[Path], Awaitable[float]]]] = {
    "gRPC ModelInfer, fixed batch, ten at once": partial(_grpc_infer, batch=1),
    "gRPC ModelInfer, open batch, ten at once": partial(_grpc_infer, batch=-1),
    "REST infer": partial(_rest_infer, load=load_pass_through, request=_infer_post()),
    "REST infer, known API key": partial(
        _rest_infer,
        load=load_pass_through,
        request=_infer_post(_JSON, "Authorization: Bearer shop"),
        is_guarded=True,
    ),
    "REST infer, servable without a checkpoint": partial(_rest_infer, load=_load_immediate, request=_infer_post()),
    "REST infer, binary tensors": partial(
        _rest_infer,
        load=_load_immediate,
        request=_infer_post(_BINARY_HEAD + bytes(8), f"Inference-Header-Content-Length: {len(_BINARY_HEAD)}"),
    ),
    "REST POST to a handler": _rest_handler,
    "OpenVINO inference on the event loop, without trio": partial(_network_infer, is_inline=True),
    "OpenVINO inference in the request pool, without trio": partial(_network_infer, is_inline=False),
    "pipeline request of 100,000 empty fields, decoding": _decode_empty_fields,
}


# The command


@dataclass(frozen=True, slots=True)
class Comparison:
    """Calls of a case now and in the baseline, where it has one."""

    case: str
    calls: float
    baseline: float | None

    @property
    def ratio(self) -> float:
        """Return the ratio of the calls to the baseline; NaN without a baseline."""
        return self.calls / self.baseline if self.baseline else math.nan

    @property
    def is_worse(self) -> bool:
        """Return whether the case makes more calls than the baseline allows."""
        return self.ratio > MAX_RATIO

    def __str__(self) -> str:
        mark = "**" if self.is_worse else ""
        baseline = "-" if self.baseline is None else f"{self.baseline:.1f}"
        ratio = "-" if self.baseline is None else f"{mark}{self.ratio:.2f}{mark}"
        return f"| {self.case} | {self.calls:.1f} | {baseline} | {ratio} |"


def compare_calls(arguments: list[str]) -> None:
    """Compare the Python calls of requests with the baseline; exits with 1 if a case makes 5 % more."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks calls", description=compare_calls.__doc__)
    parser.add_argument("--record", action="store_true", help="write the baseline instead")
    parser.add_argument("--baseline", type=Path, default=BASELINE, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    baseline = {} if options.record else _read_baseline(options.baseline)
    rows = [Comparison(case, _measure(case), baseline.get(case)) for case in CASES]
    print("| case | calls now | baseline | ratio |\n|---|---|---|---|", *rows, sep="\n")
    if options.record:
        _write_baseline(options.baseline, rows)
        print(f"\nrecorded in {options.baseline}")
        return
    missing = [row.case for row in rows if row.baseline is None]
    if missing:
        sys.exit(f"no baseline for {'; '.join(missing)}: record one with --record")
    sys.exit(any(row.is_worse for row in rows))


def _measure(case: str) -> float:
    # The servers' log lines would hide the table.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with tempfile.TemporaryDirectory() as folder:
        return trio.run(CASES[case], Path(folder))


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def _read_baseline(path: Path) -> dict[str, float]:
    """Read the recorded calls of each case; exits where there are none."""
    try:
        recorded = json.loads(path.read_text())
        calls: dict[str, float] = recorded["calls"]
        python = recorded["python"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        sys.exit(f"{path} is no baseline of calls: {error}; record one with --record")
    if python != _python():
        print(f"The baseline was recorded with Python {python}, this is {_python()}: ratios may differ.\n")
    return calls


def _write_baseline(path: Path, rows: list[Comparison]) -> None:
    recorded = {
        "machine": machine(),
        "python": _python(),
        "calls": {row.case: round(row.calls, 1) for row in rows},
    }
    path.write_text(json.dumps(recorded, indent=1) + "\n")
