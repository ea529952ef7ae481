"""Rolling restarts under load: calls, probes, streams and stored sequences."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.processes import OvmsProcess, serving
from tests.support.projects import write_project
from tests.support.system_servers import worker_configuration
from tests.support.waits import WAIT_SECONDS, until
from tests.support.worker_clients import ROW, step, sum_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def _message(model: str, name: str, row: Any, **parameters: int) -> Any:
    message = service_pb2.ModelInferRequest(model_name=model)
    message.inputs.add(name=name, datatype="FP32", shape=row.shape)
    message.raw_input_contents.append(row.tobytes())
    for key, value in parameters.items():
        if isinstance(value, bool):
            message.parameters[key].bool_param = value
        else:
            message.parameters[key].int64_param = value
    return message


SLOWLY_LOADED = """
import time

class Handler:
    def __init__(self):
        time.sleep(2)

    def handle_get(self):
        return "loaded"
"""
PROBES = "/v2/health/ready", "/v2/health/live", "/v2/models/dummy/ready", "/v2/models/acc/ready", "/slow"
ONES = np.ones((1, 10), np.float32)
TWOS = (ONES + 1).tobytes()


class _Load:
    """Clients in threads, each of which repeats its calls until the end or its first failure."""

    def __init__(self, server: OvmsProcess) -> None:
        self.server = server
        self.right: Counter[str] = Counter()
        self.failures: list[str] = []
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, name: str, call: Callable[[], None], seconds: float = 0.01) -> None:
        def repeat() -> None:
            while not self._is_over.wait(seconds):
                try:
                    call()
                except Exception as error:  # noqa: BLE001 - each failure counts
                    self.failures.append(f"{name} after {self.right[name]} calls: {error!r}")
                    if len(self.failures) > 20:
                        return
                else:
                    self.right[name] += 1

        thread = threading.Thread(target=repeat)
        thread.start()
        self._threads.append(thread)

    def end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def until_each_was_answered(self) -> None:
        before = self.right.copy()
        until(lambda: bool(self.failures) or all(count > before[name] for name, count in self.right.items()))

    # Clients

    def rest(self, client: httpx.Client) -> None:
        answer = client.post("/v2/models/dummy/infer", json=ROW).raise_for_status().json()
        assert answer["outputs"][0]["data"] == [2.0] * 10

    def new_rest(self) -> None:
        with httpx.Client(base_url=self.server.rest, timeout=WAIT_SECONDS) as client:
            self.rest(client)

    def probe(self, path: str) -> None:
        httpx.get(f"{self.server.rest}{path}", timeout=WAIT_SECONDS).raise_for_status()

    def call_grpc(self, channel: grpc.Channel) -> None:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answer = stub.ModelInfer(_message("dummy", "b", ONES), timeout=WAIT_SECONDS)
        assert list(answer.raw_output_contents) == [TWOS]

    def new_grpc(self) -> None:
        with grpc.insecure_channel(self.server.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            assert stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=WAIT_SECONDS).ready
            ready = service_pb2.ModelReadyRequest(name="dummy")
            assert stub.ModelReady(ready, timeout=WAIT_SECONDS).ready
            self.call_grpc(channel)

    def stream(self, channel: grpc.Channel) -> None:
        """Send messages one after the other, for about a second."""
        received = threading.Semaphore(1)

        def messages() -> Iterator[Any]:
            for _ in range(50):
                received.acquire(timeout=WAIT_SECONDS)
                yield _message("dummy", "b", ONES)
                self._is_over.wait(0.02)

        answers = 0
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for answer in stub.ModelStreamInfer(messages(), timeout=WAIT_SECONDS):
            assert not answer.error_message, answer.error_message
            assert list(answer.infer_response.raw_output_contents) == [TWOS]
            answers += 1
            received.release()
        assert answers == 50

    def start_sequence(self, identity: int, client: httpx.Client, channel: grpc.Channel) -> None:
        """Step a sequence over REST and gRPC in turns, and check each sum."""
        count = 0
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def make_step() -> None:
            nonlocal count
            if count % 2:
                parameters = {"sequence_id": identity, "sequence_start": not count}
                answer = stub.ModelInfer(_message("acc", "x", np.array([[1, 2]], np.float32), **parameters), timeout=60)
                total = np.frombuffer(answer.raw_output_contents[0], np.float32)[0]
            else:
                total, _ = sum_of(step(client, identity, start=not count))
            assert total == count + 1, f"sum {total} after {count} steps"
            count += 1

        self.start(f"sequence {identity}", make_step, 0.02)


@pytest.mark.parametrize("renewals", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_nothing_fails_while_workers_are_renewed_under_load(tmp_path: Path, renewals: int) -> None:
    write_project(tmp_path / "slow", SLOWLY_LOADED)
    config = worker_configuration(tmp_path, handlers=("who", "slow"))
    options = ["--config_path", str(config), "--sequence_store", str(tmp_path / "kept")]
    with serving(*options, "--workers", "2", log=tmp_path / "log") as server:
        load = _Load(server)
        try:
            with (
                httpx.Client(base_url=server.rest, timeout=WAIT_SECONDS) as client,
                grpc.insecure_channel(server.grpc) as channel,
            ):
                load.start("REST", lambda: load.rest(client))
                load.start("new REST connection", load.new_rest)
                for path in (
                    "/v2/health/ready",
                    "/v2/health/live",
                    "/v2/models/dummy/ready",
                    "/v2/models/acc/ready",
                    "/slow",
                ):
                    load.start(path, lambda path=path: load.probe(path))  # type: ignore[misc]  # the loop's own
                load.start("gRPC", lambda: load.call_grpc(channel))
                load.start("new gRPC connection", load.new_grpc)
                load.start("stream", lambda: load.stream(channel))
                for identity in range(1, 7):
                    load.start_sequence(identity, client, channel)
                for count in range(1, renewals + 1):
                    load.until_each_was_answered()
                    server.process.send_signal(signal.SIGHUP)
                    until(
                        lambda count=count: server.printed_so_far().count("rolling restart finished") == count,  # type: ignore[misc]  # the loop's own
                        seconds=120,
                    )
                load.until_each_was_answered()
                load.end()
        finally:
            load.end()
        assert not load.failures, "\n".join(load.failures)
        assert server.stop()[0] == 0
