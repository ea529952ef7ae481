from __future__ import annotations

import json
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import openvino as ov
import pytest
import tritonclient.grpc

from tests.support import ir
from tests.support.processes import OvmsProcess, run_ovms, serving
from tests.support.servables import verdicts
from tests.support.system_servers import write_config
from tests.support.waits import WAIT_SECONDS, until

INPUT = np.arange(10, dtype=np.float32).reshape(1, 10)
SERVICE = "/inference.GRPCInferenceService"


def _config(folder: Path, **models: Path) -> Path:
    return write_config(folder, *({"name": name, "base_path": str(path)} for name, path in models.items()))


def _save(model: ov.Model, base: Path, version: int) -> Path:
    """Write a version in a hidden folder, and rename the folder: the server never sees a part of the version."""
    hidden = base.parent / f".{base.name}-{version}"
    hidden.mkdir(parents=True)
    ov.save_model(model, hidden / "model.xml", compress_to_fp16=False)
    base.mkdir(parents=True, exist_ok=True)
    hidden.rename(base / str(version))
    return base


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return _save(ir.dummy(), tmp_path / "m", 1)


class _Load:
    def __init__(self, server: OvmsProcess) -> None:
        self.seen: list[float] = []
        self.failures: list[Exception] = []
        self._address = server.grpc
        self._stop = threading.Event()

    def run(self) -> None:
        tensor = tritonclient.grpc.InferInput("b", [1, 10], "FP32")
        tensor.set_data_from_numpy(INPUT)
        with tritonclient.grpc.InferenceServerClient(self._address) as client:
            while not self._stop.is_set():
                try:
                    found = client.infer("m", [tensor], client_timeout=WAIT_SECONDS).as_numpy("a")
                except Exception as error:  # noqa: BLE001 - the test judges it
                    self.failures.append(error)
                    return
                self.seen.append(float((found - INPUT).mean()))

    def stop(self) -> None:
        self._stop.set()


@contextmanager
def _under_load(server: OvmsProcess, clients: int = 3) -> Iterator[_Load]:
    load = _Load(server)
    threads = [threading.Thread(target=load.run) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(load.seen) > 20 or load.failures)
        yield load
    finally:
        load.stop()
        for thread in threads:
            thread.join()


def _reload(server: OvmsProcess) -> httpx.Response:
    return httpx.post(f"{server.rest}/v1/config/reload", timeout=WAIT_SECONDS)


def test_no_call_fails_while_models_change(tmp_path: Path, model: Path) -> None:
    config = _config(tmp_path, m=model)
    options = ("--config_path", str(config), "--file_system_poll_wait_seconds", "0")
    with serving(*options) as server, _under_load(server) as load:
        for version in (2, 3, 4):
            _save(ir.dummy(addend=version), model, version)
            assert _reload(server).status_code == 201
            until(lambda version=version: load.seen[-1] == version or load.failures)  # type: ignore[misc]  # the loop's own
            shutil.rmtree(model / str(version - 1))
        document = json.loads(config.read_text())
        for nireq in range(1, 6):
            document["model_config_list"][0]["config"]["nireq"] = nireq
            config.write_text(json.dumps(document))
            assert _reload(server).status_code == 201
        assert _reload(server).status_code == 200
        config.write_text(json.dumps(document).replace("base_path", "base_pth"))
        answer = _reload(server)
        assert answer.status_code == 412
        assert "base_pth" in answer.json()["error"]
        now = len(load.seen)
        until(lambda: len(load.seen) > now + 10 or load.failures)
    assert load.failures == []
    assert set(load.seen) == {1, 2, 3, 4}


@pytest.mark.slow
def test_a_version_that_crashes_openvino_disturbs_no_other(tmp_path: Path, model: Path) -> None:
    bad = ir.save(ir.steps(bad=1), tmp_path, "bad")
    config = _config(tmp_path, m=model, bad=bad)
    options = ("--cache_dir", str(tmp_path / "cache"), "--crash_probe", "auto", "--file_system_poll_wait_seconds", "0")
    with serving("--config_path", str(config), *options, ready=False) as server:
        server.wait_live()
        until(lambda: "SIGFPE" in server.get("/v2/health/ready").text)
        _config(tmp_path, m=model)
        assert _reload(server).status_code == 201
        server.wait_ready()
        with _under_load(server) as load:
            shutil.copytree(bad / "1", model / "2")
            answer = _reload(server)
            assert answer.status_code == 500
            assert "OpenVINO crashes with SIGFPE when it runs the model in layer counting (Range)" in answer.text
        assert load.failures == []
        assert set(load.seen) == {1}
        assert server.get("/v2/models/m/ready").is_success
    (verdict,) = (each for each in verdicts(tmp_path / "cache/trials") if each["crash"])
    assert verdict["crash"] == "SIGFPE"


def test_a_second_signal_stops_at_once(model: Path) -> None:
    options = ("--model_name", "m", "--model_path", str(model), "--drain_seconds", "600")
    with serving(*options) as server:
        with _idle_stream(server):
            server.process.send_signal(signal.SIGINT)
            until(lambda: not server.answers())
            code, _ = server.stop(signal.SIGINT)
        assert code != 0


@contextmanager
def _idle_stream(server: OvmsProcess) -> Iterator[None]:
    closing = threading.Event()

    def requests() -> Iterator[bytes]:
        closing.wait()
        yield from ()

    with grpc.insecure_channel(server.grpc) as channel:
        live = channel.unary_unary(f"{SERVICE}/ServerLive")
        live(b"", timeout=WAIT_SECONDS)
        call: Any = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(requests())
        try:
            # Calls of one connection begin in order: once this call is answered the stream is open.
            live(b"", timeout=WAIT_SECONDS)
            yield
        finally:
            closing.set()
            call.cancel()


def test_failed_start_is_explained_without_traceback(tmp_path: Path, model: Path) -> None:
    config = _config(tmp_path, m=model)
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = str(held.getsockname()[1])
        options = ("--config_path", str(config), "--grpc_bind_address", "127.0.0.1", "--rest_port", "0")
        port_in_use = run_ovms("serve", *options, "--port", port)
    config.write_text(config.read_text().replace("base_path", "base_pth"))
    misspelled_key = run_ovms("serve", "--config_path", str(config))
    for ended, hints in ((port_in_use, (port, "--port")), (misspelled_key, ("config.json:6", "base_pth", "base_path"))):
        output = " ".join(ended.stderr.split())
        assert ended.returncode == 1
        assert "Traceback" not in output
        assert [hint for hint in hints if hint not in output] == []
