"""Tests that stop, kill or reconfigure their server start a server of their own."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.grpc
import trustme

from ovmstrio.protocol.pipeline_messages import METHOD, REQUEST
from tests.support.all_kinds import write_all_kinds
from tests.support.ports import free_ports
from tests.support.project_processes import serving_project
from tests.support.projects import write_project
from tests.support.stops import StopTarget, Tally, Workload
from tests.support.waits import WAIT_SECONDS, until

STOPS = int(os.environ.get("OVMSTRIO_STOPS", "160"))
AT_ONCE = 2

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.support.served_command"])


@pytest.fixture(autouse=True, scope="module")
def _no_fork_server_left() -> Iterator[None]:
    yield
    stop = getattr(forkserver._forkserver, "_stop")  # noqa: B009, SLF001 - there is no public one, and no type of this
    stop()


ROW = {"name": "b", "shape": [1, 10], "datatype": "FP32", "data": [0.0] * 10}
TEXT = {"name": "in", "shape": [3], "datatype": "UINT8", "data": [97, 98, 99]}
HANDLER = """
class Handler:
    def handle_get(self):
        return "a"

    def handle_post(self, payload):
        return payload
"""


def _request(path: str, body: Any = None, *, is_chunked: bool = False) -> bytes:
    if body is None:
        return f"GET {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode()
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n".encode()
    if is_chunked:
        return head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(text), text)
    return head + b"Content-Length: %d\r\n\r\n" % len(text) + text


def _infer(model: str, given: str, shape: list[int], datatype: str) -> tuple[str, bytes]:
    request = tritonclient.grpc.service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name=given, datatype=datatype, shape=shape)
    size = 40 if datatype == "FP32" else 3
    request.raw_input_contents.append(b"abcd" * 10 if size == 40 else b"abc")
    return "/inference.GRPCInferenceService/ModelInfer", request.SerializeToString()


HTTP_REQUESTS = (
    _request("/v2/models/model/infer", {"inputs": [ROW]}),
    _request("/v2/models/dag/infer", {"inputs": [ROW]}),
    _request("/v2/models/graph/infer", {"inputs": [TEXT]}),
    _request("/v2/models/model/infer", {"inputs": [ROW]}, is_chunked=True),
    _request("/v2/models/model"),
    _request("/handler", [1, 2, 3]),
    _request("/ops/prediction", {"key": ["x"], "value": ["y"]}),
)
CALLS = (
    _infer("model", "b", [1, 10], "FP32"),
    _infer("dag", "b", [1, 10], "FP32"),
    _infer("graph", "in", [3], "UINT8"),
    (METHOD, REQUEST(key=["x"], value=["y"], name="ops").SerializeToString()),
)


def _is_ready(process: BaseProcess, target: StopTarget, log: Path) -> bool:
    assert process.is_alive(), log.read_text()
    verify = ssl.create_default_context(cadata=target.authority.decode()) if target.authority else False
    url = f"{'https' if target.authority else 'http'}://127.0.0.1:{target.rest}/v2/health/ready"
    with suppress(httpx.TransportError):
        return httpx.get(url, timeout=5, trust_env=False, verify=verify).is_success
    return False


@dataclass(frozen=True)
class _Tls:
    """Options for a server certificate, and the certificate of its authority (PEM); empty for a server without TLS."""

    options: tuple[str, ...] = ()
    authority: bytes = b""


def _no_tls(_: Path) -> _Tls:
    return _Tls()


def _make_tls(folder: Path) -> _Tls:
    authority, file = trustme.CA(), folder / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(file)
    return _Tls(("--tls_cert", str(file), "--tls_key", str(file)), authority.cert_pem.bytes())


def _work_until_stopped(
    target: StopTarget, seed: int, seconds: float, stop: Callable[[signal.Signals], int | None]
) -> Tally:
    work = Workload(target, seed)
    work.start()
    threading.Event().wait(seconds)
    assert stop((signal.SIGTERM, signal.SIGINT)[seed % 2]) == 0
    work.join()
    return work.tally


def _stop_all_kinds(config: Path, tls: _Tls, seed: int) -> Tally:
    """Stop a server of all kinds, which is forked from a process that has imported everything."""
    from tests.support.served_command import run_command

    grpc, rest = free_ports(2)
    log = config.parent / f"{seed}.log"
    options = ["serve", "--config_path", str(config), *tls.options, "--port", str(grpc), "--rest_port", str(rest)]
    options += ["--grpc_bind_address", "127.0.0.1", "--rest_bind_address", "127.0.0.1"]
    target = StopTarget(rest, grpc, HTTP_REQUESTS, CALLS, tls.authority)
    process = CONTEXT.Process(target=run_command, args=(options, str(log)))
    process.start()

    def stop(number: signal.Signals) -> int | None:
        assert process.pid is not None
        os.kill(process.pid, number)
        process.join(WAIT_SECONDS)
        assert process.exitcode == 0, log.read_text()
        return process.exitcode

    try:
        until(lambda: _is_ready(process, target, log), why=log.read_text)
        return _work_until_stopped(target, seed, random.Random(seed).uniform(0.1, 0.5), stop)
    finally:
        if process.is_alive():
            process.kill()
        process.join()


def _stop_project(folder: Path, tls: _Tls, processes: int, seed: int) -> Tally:
    project = write_project(folder / str(seed) / "project", HANDLER, processes=processes)
    with serving_project(project, *tls.options) as server:
        port, requests = int(server.address.rpartition(":")[2]), (_request("/"), _request("/", "a"), _request("/v2"))
        return _work_until_stopped(StopTarget(port, 0, requests, authority=tls.authority), seed, 0.3, server.stop)


def _expect_no_loss(tallies: Sequence[Tally]) -> None:
    faults = [(seed, text) for seed, tally in enumerate(tallies) for text in (*tally.lost, *tally.wrong)]
    assert not faults
    assert sum(tally.answered for tally in tallies) > len(tallies) * 5


def _stops(few: int, many: int) -> pytest.MarkDecorator:
    """Parametrize a test over TLS and the number of stops, of which there are many in slow tests."""
    return pytest.mark.parametrize(
        ("make_tls", "stops"),
        [
            pytest.param(_no_tls, few, id="plain"),
            pytest.param(_make_tls, few, id="TLS"),
            pytest.param(_no_tls, many, id="plain, many", marks=pytest.mark.slow),
            pytest.param(_make_tls, many // 4, id="TLS, many", marks=pytest.mark.slow),
        ],
    )


@_stops(4, STOPS)
def test_a_stop_loses_no_request(tmp_path: Path, make_tls: Callable[[Path], _Tls], stops: int) -> None:
    """Clients use HTTP/1.1 on kept, new and pipelined connections, HTTP/2, and grpcio."""
    stop = partial(_stop_all_kinds, write_all_kinds(tmp_path), make_tls(tmp_path))
    with ThreadPoolExecutor(AT_ONCE) as threads:
        _expect_no_loss(list(threads.map(stop, range(stops))))


@_stops(1, STOPS // 8)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_stop_of_a_project_loses_no_request(
    tmp_path: Path, processes: int, make_tls: Callable[[Path], _Tls], stops: int
) -> None:
    tls = make_tls(tmp_path)
    _expect_no_loss([_stop_project(tmp_path, tls, processes, seed) for seed in range(stops)])
