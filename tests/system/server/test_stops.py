"""Servers of all kinds stop while clients are busy with them, and no request is lost. The tests stop their servers."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
from tests.support.processes import serving_project
from tests.support.projects import write_project
from tests.support.stops import StopTarget, Workload
from tests.support.waits import WAIT_SECONDS, until

STOPS = int(os.environ.get("OVMSTRIO_STOPS", "160"))
AT_ONCE = 2
SIGNALS = (signal.SIGTERM, signal.SIGINT)

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.support.served_command"])


@pytest.fixture(autouse=True, scope="module")
def _no_fork_server_left() -> Iterator[None]:
    """End the process that forked the servers, which otherwise outlives the tests of this file."""
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
    """Return the bytes of a request; the framework reads a chunked one."""
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


class _Server:
    def __init__(self, process: BaseProcess, target: StopTarget, log: Path) -> None:
        self.process = process
        self.target = target
        self.log = log

    def wait_ready(self) -> None:
        authority = self.target.authority
        url = f"{'https' if authority else 'http'}://127.0.0.1:{self.target.rest}/v2/health/ready"
        verify = ssl.create_default_context(cadata=authority.decode()) if authority else False

        def is_ready() -> bool:
            assert self.process.is_alive(), self.log.read_text()
            with suppress(httpx.TransportError):
                return httpx.get(url, timeout=5, trust_env=False, verify=verify).is_success
            return False

        until(is_ready, why=self.log.read_text)

    def stop(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        self.process.join(WAIT_SECONDS)
        assert self.process.exitcode == 0, self.log.read_text()


@dataclass(frozen=True)
class _Tls:
    options: tuple[str, ...] = ()
    authority: bytes = b""

    @classmethod
    def made_in(cls, folder: Path) -> _Tls:
        authority = trustme.CA()
        file = folder / "server.pem"
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(file)
        return cls(("--tls_cert", str(file), "--tls_key", str(file)), authority.cert_pem.bytes())


_PLAIN = _Tls()


@contextmanager
def _serving(config: Path, tls: _Tls, log: Path) -> Iterator[_Server]:
    from tests.support.served_command import run_command

    grpc, rest = free_ports(2)
    options = ["serve", "--config_path", str(config), *tls.options, "--port", str(grpc), "--rest_port", str(rest)]
    options += ["--grpc_bind_address", "127.0.0.1", "--rest_bind_address", "127.0.0.1"]
    process = CONTEXT.Process(target=run_command, args=(options, str(log)))
    process.start()
    try:
        server = _Server(process, StopTarget(rest, grpc, HTTP_REQUESTS, CALLS, tls.authority), log)
        server.wait_ready()
        yield server
    finally:
        if process.is_alive():
            process.kill()
        process.join()


class _Verdict:
    def __init__(self) -> None:
        self.answered = 0
        self.faults: list[str] = []
        self._lock = threading.Lock()

    def add(self, work: Workload, what: str) -> None:
        tally = work.tally
        with self._lock:
            self.answered += tally.answered
            self.faults += [f"{what}: lost: {text}" for text in tally.lost]
            self.faults += [f"{what}: wrong: {text}" for text in tally.wrong]

    def check(self, stops: int) -> None:
        assert not self.faults, "\n".join(self.faults)
        assert self.answered > stops * 5


def _stop_all_kinds(config: Path, tls: _Tls, folder: Path, seed: int, verdict: _Verdict) -> None:
    chance = random.Random(seed)
    number = SIGNALS[seed % 2]
    with _serving(config, tls, folder / f"{seed}.log") as server:
        work = Workload(server.target, seed)
        work.start()
        threading.Event().wait(0.1 + chance.random() * 0.4)
        server.stop(number)
        work.join()
    verdict.add(work, f"{number.name} {seed}")


def _stop_many(folder: Path, tls: _Tls, stops: int) -> None:
    config = write_all_kinds(folder)
    verdict = _Verdict()
    seeds = iter(range(stops))
    lock = threading.Lock()
    failures: list[BaseException] = []

    def go_on() -> None:
        while True:
            with lock:
                seed = next(seeds, None)
            if seed is None:
                return
            try:
                _stop_all_kinds(config, tls, folder, seed, verdict)
            except BaseException as error:
                failures.append(error)
                raise

    threads = [threading.Thread(target=go_on) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    verdict.check(stops)


@pytest.mark.parametrize(
    ("is_encrypted", "stops"),
    [
        pytest.param(False, 4, id="plain"),
        pytest.param(True, 4, id="TLS"),
        pytest.param(False, STOPS, id="plain, many", marks=pytest.mark.slow),
        pytest.param(True, STOPS // 6, id="TLS, many", marks=pytest.mark.slow),
    ],
)
def test_a_stop_loses_no_request(tmp_path: Path, stops: int, *, is_encrypted: bool) -> None:
    """Servers of all kinds stop under load: HTTP/1.1 on kept, new and pipelined connections, HTTP/2, and grpcio."""
    _stop_many(tmp_path, _Tls.made_in(tmp_path) if is_encrypted else _PLAIN, stops)


def _stop_project(folder: Path, tls: _Tls, processes: int, seed: int, verdict: _Verdict) -> None:
    project = write_project(folder / "project", HANDLER, processes=processes)
    with serving_project(project, *tls.options) as server:
        port, requests = int(server.address.rpartition(":")[2]), (_request("/"), _request("/", "a"), _request("/v2"))
        target = StopTarget(port, 0, requests, authority=tls.authority)
        work = Workload(target, seed)
        work.start()
        threading.Event().wait(0.3)
        code = server.stop(SIGNALS[seed % 2])
        work.join()
        assert code == 0, server.lines
    verdict.add(work, f"{processes} processes {seed}")


@pytest.mark.parametrize(
    ("is_encrypted", "stops"),
    [
        pytest.param(False, 1, id="plain"),
        pytest.param(True, 1, id="TLS"),
        pytest.param(False, STOPS // 8, id="plain, many", marks=pytest.mark.slow),
        pytest.param(True, STOPS // 24, id="TLS, many", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_stop_of_a_project_loses_no_request(
    tmp_path: Path, processes: int, stops: int, *, is_encrypted: bool
) -> None:
    """Projects of one process, and of two that a parent gives connections to, stop under load."""
    tls = _Tls.made_in(tmp_path) if is_encrypted else _PLAIN
    verdict = _Verdict()
    for seed in range(stops):
        _stop_project(tmp_path / str(seed), tls, processes, seed, verdict)
    verdict.check(stops)
