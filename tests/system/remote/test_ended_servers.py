from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.support import ir
from tests.support.ports import free_ports
from tests.support.processes import OvmsProcess, running, serving
from tests.support.waits import WAIT_SECONDS, until


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return ir.save(ir.dummy(), tmp_path / "models", "dummy")


@contextmanager
def _far(model: Path, ports: Sequence[int]) -> Iterator[OvmsProcess]:
    options = ["serve", "--model_name", "dummy", "--model_path", str(model), "--crash_probe", "off"]
    options += ["--port", str(ports[0]), "--rest_port", str(ports[1])]
    options += ["--grpc_bind_address", "127.0.0.1", "--rest_bind_address", "127.0.0.1"]
    with running(*options, grpc=ports[0], rest=ports[1]) as server:
        yield server


@contextmanager
def _near(
    folder: Path, *addresses: str, ready: bool = True, local: Path | None = None, **settings: Any
) -> Iterator[tuple[OvmsProcess, Any]]:
    entry = {"name": "m", "remote": addresses, "remote_name": "dummy", "health_seconds": 0.2, **settings}
    entries = [entry] if local is None else [entry, {"name": "local", "base_path": str(local)}]
    config = folder / "near.json"
    config.write_text(json.dumps({"model_config_list": [{"config": each} for each in entries]}))
    options = ("--config_path", str(config), "--file_system_poll_wait_seconds", "0.2")
    with serving(*options, ready=ready) as server, triton.InferenceServerClient(server.grpc) as client:
        yield server, client


def _infer(client: Any) -> list[float]:
    given = triton.InferInput("b", [1, 10], "FP32")
    given.set_data_from_numpy(np.ones((1, 10), np.float32))
    found: list[float] = client.infer("m", [given], client_timeout=WAIT_SECONDS).as_numpy("a")[0].tolist()
    return found


def test_a_remote_model_follows_a_killed_and_restarted_server(tmp_path: Path, model: Path) -> None:
    ports = free_ports(2)
    where = f"grpc://127.0.0.1:{ports[0]}"
    with ExitStack() as stack:
        first = stack.enter_context(_far(model, ports))
        near, client = stack.enter_context(_near(tmp_path, where, retry_pause_ms=1))
        assert _infer(client) == [2.0] * 10
        first.stop(signal.SIGKILL)
        with pytest.raises(triton.InferenceServerException, match=where) as caught:
            _infer(client)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
        until(lambda: not near.answers("/v2/health/ready"))
        assert f'remote model \\"m\\": {where}' in near.get("/v2/health/ready").text
        stack.enter_context(_far(model, ports))
        near.wait_ready()
        assert _infer(client) == [2.0] * 10


@pytest.mark.slow
def test_a_remote_model_loads_when_its_server_starts(tmp_path: Path, model: Path) -> None:
    ports = free_ports(2)
    where = f"grpc://127.0.0.1:{ports[0]}"
    with _near(tmp_path, where, ready=False, local=model) as (near, client):
        near.wait_live()
        until(lambda: near.answers("/v2/models/local/ready"))
        until(lambda: f"{where} cannot be reached: Connection refused" in near.get("/v2/health/ready").text)
        with _far(model, ports):
            near.wait_ready()
            assert _infer(client) == [2.0] * 10
