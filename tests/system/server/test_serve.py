"""``ovms serve`` as a user runs it, called by the clients that users have."""

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

import numpy as np
import openvino as ov
import pytest

from tests.support import ir
from tests.support.processes import OvmsProcess, run_ovms, serving
from tests.support.trials import verdicts

pytestmark = pytest.mark.e2e

INPUT = np.arange(10, dtype=np.float32).reshape(1, 10)


def _config(root: Path, **models: Path) -> Path:
    entries = [{"config": {"name": name, "base_path": str(path)}} for name, path in models.items()]
    path = root / "config.json"
    path.write_text(json.dumps({"model_config_list": entries}))
    return path


def _plus(number: float) -> ov.Model:
    import openvino.opset13 as op

    b = op.parameter([1, 10], np.float32, name="b")
    b.output(0).set_names({"b"})
    a = op.add(b, np.float32(number))
    a.output(0).set_names({"a"})
    return ov.Model([op.result(a)], [b], "plus")


def _save(model: ov.Model, base: Path, version: int) -> Path:
    """Write a version so that it appears as a whole, as a careful operator would."""
    hidden = base.parent / f".{base.name}-{version}"
    hidden.mkdir(parents=True)
    ov.save_model(model, hidden / "model.xml", compress_to_fp16=False)
    base.mkdir(parents=True, exist_ok=True)
    hidden.rename(base / str(version))
    return base


def _triton_grpc(address: str) -> Any:
    from tritonclient.grpc import InferenceServerClient

    return InferenceServerClient(address)


def _infer_grpc(client: Any, model: str = "m") -> float:
    """Call and return what the model added."""
    from tritonclient.grpc import InferInput

    tensor = InferInput("b", [1, 10], "FP32")
    tensor.set_data_from_numpy(INPUT)
    return float((client.infer(model, [tensor], client_timeout=20).as_numpy("a") - INPUT).mean())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that adds one, as version 1."""
    return _save(_plus(1), tmp_path / "m", 1)


def test_unmodified_clients_get_right_answers_over_both_protocols(tmp_path: Path, model: Path) -> None:
    """Triton's gRPC and HTTP clients call one server, the latter with and without binary tensors."""
    from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

    with serving("--config_path", str(_config(tmp_path, m=model))) as server:
        with _triton_grpc(server.grpc) as client:
            assert client.is_server_ready()
            assert client.is_model_ready("m")
            assert client.get_model_metadata("m").platform == "OpenVINO"
            assert _infer_grpc(client) == 1
        with InferenceServerClient(server.rest.removeprefix("http://")) as http:
            for binary in (True, False):
                tensor = InferInput("b", [1, 10], "FP32")
                tensor.set_data_from_numpy(INPUT, binary_data=binary)
                answer = http.infer("m", [tensor], outputs=[InferRequestedOutput("a", binary_data=binary)])
                np.testing.assert_array_equal(answer.as_numpy("a"), INPUT + 1)


def test_a_single_model_is_served_from_the_command_line(model: Path) -> None:
    """A model needs no configuration file."""
    with serving("--model_name", "named", "--model-path", str(model)) as server, _triton_grpc(server.grpc) as client:
        assert _infer_grpc(client, "named") == 1


class _Load:
    """Calls a model without a pause until told to stop, and keeps what went wrong."""

    def __init__(self, server: OvmsProcess) -> None:
        self.seen: list[float] = []
        self.failures: list[Exception] = []
        self._address = server.grpc
        self._stop = threading.Event()

    def run(self) -> None:
        with _triton_grpc(self._address) as client:
            while not self._stop.is_set():
                try:
                    self.seen.append(_infer_grpc(client))
                except Exception as error:  # noqa: BLE001 - what it is is judged by the test
                    self.failures.append(error)
                    return

    def stop(self) -> None:
        self._stop.set()


@contextmanager
def _under_load(server: OvmsProcess, clients: int = 3) -> Iterator[_Load]:
    load = _Load(server)
    threads = [threading.Thread(target=load.run) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.stop()
        for thread in threads:
            thread.join()


def _wait_until(condition: Any, seconds: float = 20) -> None:
    """Look again and again, because what is waited for happens in another process."""
    for _ in range(int(seconds / 0.02)):
        if condition():
            return
        threading.Event().wait(0.02)
    raise AssertionError("it did not happen in time")


def test_no_request_fails_while_versions_come_and_go(tmp_path: Path, model: Path) -> None:
    """New versions are taken up and old ones retired under load, and every call is answered by one of them."""
    with serving("--config_path", str(_config(tmp_path, m=model))) as server, _under_load(server) as load:
        for version in (2, 3, 4):
            _wait_until(lambda: len(load.seen) > 20)
            _save(_plus(version), model, version)
            _wait_until(lambda version=version: load.seen[-1] == version)
            shutil.rmtree(model / str(version - 1))
        assert load.failures == []
    assert set(load.seen) == {1, 2, 3, 4}


def test_no_request_fails_while_the_configuration_is_edited(tmp_path: Path, model: Path) -> None:
    """A model that is loaded again with other settings answers throughout."""
    config = _config(tmp_path, m=model)
    options = ("--config_path", str(config), "--file_system_poll_wait_seconds", "0")
    with serving(*options) as server, _under_load(server) as load:
        for nireq in range(1, 6):
            document = json.loads(config.read_text())
            document["model_config_list"][0]["config"]["nireq"] = nireq
            config.write_text(json.dumps(document))
            assert _post(server, "/v1/config/reload").status_code == 201
        assert _post(server, "/v1/config/reload").status_code == 200
        assert load.failures == []
        assert len(load.seen) > 0


def _post(server: OvmsProcess, path: str) -> Any:
    import httpx

    return httpx.post(server.rest + path, timeout=30)


def test_a_typo_in_a_reloaded_configuration_leaves_everything_serving(tmp_path: Path, model: Path) -> None:
    """The answer to the reload says what is wrong, and the model answers as before."""
    config = _config(tmp_path, m=model)
    with serving("--config_path", str(config), "--file_system_poll_wait_seconds", "0") as server:
        config.write_text(config.read_text().replace("base_path", "base_pth"))
        answer = _post(server, "/v1/config/reload")
        assert answer.status_code == 412
        assert "base_pth" in answer.json()["error"]
        with _triton_grpc(server.grpc) as client:
            assert _infer_grpc(client) == 1


def test_a_corrupt_model_is_explained_and_leaves_the_others_serving(tmp_path: Path, model: Path) -> None:
    """The server is up but not ready, and says of which model and why."""
    broken = tmp_path / "broken" / "1"
    broken.mkdir(parents=True)
    (broken / "model.onnx").write_bytes(b"this is not a model")
    config = _config(tmp_path, m=model, broken=broken.parent)
    with serving("--config_path", str(config), ready=False) as server:
        server.wait_live()
        _wait_until(lambda: "broken" in server.get("/v1/config").json())
        _wait_until(lambda: server.get("/v1/config").json()["broken"]["model_version_status"][0]["state"] == "LOADING")
        with _triton_grpc(server.grpc) as client:
            assert _infer_grpc(client) == 1
        _wait_until(lambda: "model.onnx" in server.get("/v2/health/ready").text)
        assert server.get("/v2/health/ready").status_code == 503


@pytest.mark.slow
def test_a_version_that_crashes_openvino_comes_and_goes_and_nobody_else_notices(tmp_path: Path, model: Path) -> None:
    """At the start of the server it is the reason why that is not ready; by a reload the old version serves on."""
    bad = ir.save(ir.steps(bad=1), tmp_path, "bad")
    config = _config(tmp_path, m=model, bad=bad)
    options = ("--cache_dir", str(tmp_path / "cache"), "--trial_load", "auto", "--file_system_poll_wait_seconds", "0")
    with serving("--config_path", str(config), *options, ready=False) as server:
        server.wait_live()
        _wait_until(lambda: "SIGFPE" in server.get("/v2/health/ready").text)
        _config(tmp_path, m=model)
        assert _post(server, "/v1/config/reload").status_code == 201
        server.wait_ready()
        with _under_load(server) as load:
            shutil.copytree(bad / "1", model / "2")
            answer = _post(server, "/v1/config/reload")
            assert answer.status_code == 500
            assert "OpenVINO crashes with SIGFPE when it runs the model, in its layer counting (Range)" in answer.text
        assert load.failures == []
        assert set(load.seen) == {1}
        assert server.get("/v2/models/m/ready").is_success
    (verdict,) = (each for each in verdicts(tmp_path / "cache/trials") if each["crash"])
    assert verdict["crash"] == "SIGFPE"


def test_calls_in_flight_finish_when_the_server_is_told_to_stop(tmp_path: Path, model: Path) -> None:
    """After the first signal no call is cut: each is answered or was never begun."""
    import grpc

    with serving("--config_path", str(_config(tmp_path, m=model))) as server, _under_load(server) as load:
        _wait_until(lambda: len(load.seen) > 100)
        code, output = server.stop(signal.SIGTERM)
        assert code == 0, output
    for failure in load.failures:
        # A client that comes after the listener has closed finds nobody, which is what load balancers handle.
        assert failure.status() == f"StatusCode.{grpc.StatusCode.UNAVAILABLE.name}"  # type: ignore[attr-defined]
        assert "connect" in str(failure).lower() or "goaway" in str(failure).lower() or "shutting" in str(failure)


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    """The wait for a slow call ends when the operator insists."""
    base = ir.save(ir.slow(), tmp_path, "slow", 1)
    with serving("--config_path", str(_config(tmp_path, slow=base)), "--drain_seconds", "600") as server:
        with _idle_call(server):
            server.process.send_signal(signal.SIGINT)
            _wait_until(lambda: not server.answers())
            code, _ = server.stop(signal.SIGINT)
        assert code != 0


@contextmanager
def _idle_call(server: OvmsProcess) -> Iterator[None]:
    """Hold a call open that never ends by itself: a stream whose client says nothing."""
    import grpc

    closing = threading.Event()

    def requests() -> Iterator[bytes]:
        closing.wait()
        yield from ()

    with grpc.insecure_channel(server.grpc) as channel:
        live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        live(b"", timeout=20)
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(requests())
        try:
            # Calls of one connection begin in order: once this one is answered the stream is open.
            live(b"", timeout=20)
            yield
        finally:
            closing.set()
            call.cancel()


def test_a_port_in_use_is_named(model: Path) -> None:
    """Nothing is loaded, the exit code says failure, and the message says which option to change."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        options = ("--model_name", "m", "--model_path", str(model), "--grpc_bind_address", "127.0.0.1")
        done = run_ovms("serve", *options, "--port", str(port), "--rest_port", "0")
    assert done.returncode == 1
    assert str(port) in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_typo_in_the_configuration_is_located(tmp_path: Path, model: Path) -> None:
    """Start-up ends with the file, the line and what was probably meant."""
    config = _config(tmp_path, m=model)
    config.write_text(json.dumps(json.loads(config.read_text()), indent=1).replace("base_path", "base_pth"))
    done = run_ovms("serve", "--config_path", str(config))
    assert done.returncode == 1
    output = " ".join(done.stderr.split())
    assert "config.json:6" in output
    assert "base_pth" in output
    assert "base_path" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "options",
    [
        ("--no_such_option",),
        ("--port", "70000"),
        ("--model_name", "m"),
        ("--config_path", "config.json", "--model_name", "m", "--model_path", "here"),
        ("--port", "8000", "--rest_port", "8000"),
    ],
)
def test_a_wrong_command_line_exits_with_64(options: tuple[str, ...]) -> None:
    """Scripts can tell a usage error from a failure, as with OVMS."""
    done = run_ovms("serve", *options)
    assert done.returncode == 64
    assert "Traceback" not in done.stderr
