from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import InferenceServerClient

from tests.support import ir
from tests.support.ports import free_ports
from tests.support.processes import OvmsProcess, serving
from tests.support.system_servers import write_config
from tests.support.waits import WAIT_SECONDS, until
from tests.support.worker_clients import ROW, kill_worker, sample

if TYPE_CHECKING:
    from pathlib import Path

_SERVING = health_pb2.HealthCheckResponse.SERVING


def _ready(server: OvmsProcess) -> list[bool]:
    """Return the readiness over every protocol."""
    with InferenceServerClient(server.grpc) as triton, grpc.insecure_channel(server.grpc) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)
        return [
            server.get("/v2/health/ready").status_code == 200,
            server.get("/health").status_code == 200,
            triton.is_server_ready(client_timeout=WAIT_SECONDS),
            check.status == _SERVING,
            sample(server, "ovmstrio_ready") == 1,
        ]


def _listed(server: OvmsProcess) -> dict[str, str]:
    return {each["name"]: each.get("reason", "") for each in server.get("/v2/models").json()["models"]}


def _infer_late(server: OvmsProcess) -> list[float]:
    answer = httpx.post(f"{server.rest}/v2/models/late/infer", json=ROW, timeout=WAIT_SECONDS)
    return answer.json()["outputs"][0]["data"] if answer.status_code == httpx.codes.OK else []


@pytest.mark.parametrize("workers", ["1", "2"])
def test_wrong_entries_added_to_a_running_server_are_reported_and_leave_it_ready(tmp_path: Path, workers: str) -> None:
    ir.save(ir.dummy(), tmp_path, "dummy")
    dummy, late = {"name": "dummy", "base_path": "dummy"}, {"name": "late", "base_path": "dummy"}
    config = write_config(tmp_path, dummy)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "graph.pbtxt").write_text("node {")
    (port,) = free_ports(1)
    with serving("--config_path", str(config), "--workers", workers, log=tmp_path / "log") as server:
        assert _ready(server) == [True] * 5
        wrong = {"name": "typo", "base_path": "dumy"}, {"name": "far", "remote": f"grpc://127.0.0.1:{port}"}
        graphs = [{"name": "graph", "base_path": "broken"}]
        write_config(tmp_path, dummy, *wrong, late, mediapipe_config_list=graphs)
        until(lambda: _listed(server).keys() >= {"typo", "graph", "far", "late"})
        until(lambda: all(_listed(server)[name] for name in ("typo", "graph", "far")))
        assert _ready(server) == [True] * 5
        reasons = _listed(server)
        assert "does not exist" in reasons["typo"]
        assert "graph.pbtxt" in reasons["graph"]
        assert "cannot be reached" in reasons["far"]
        # A worker may list a model that it still loads.
        assert until(lambda: _infer_late(server)) == [2.0] * 10
        log = server.printed_so_far()
        assert "model not served" in log
        assert "load failed" in log
        if workers == "2":
            kill_worker(server, server.descendants("ovmstrio.workers.worker")[0].pid)
            until(lambda: server.answers("/v2/health/ready"))
            assert _ready(server) == [True] * 5
        # A service that was available is missed.
        (tmp_path / "dummy" / "1").rename(tmp_path / "removed")
        # Each worker sees it by itself.
        until(lambda: _ready(server) == [False] * 5)
        assert 'model "dummy": ' in server.get("/v2/health/ready").json()["error"]
        (tmp_path / "removed").rename(tmp_path / "dummy" / "1")
        until(lambda: server.answers("/v2/health/ready"))


@pytest.mark.parametrize(
    ("options", "required", "ready"),
    [
        ((), True, False),
        ((), False, True),
        (("--ready_requires", "started"), True, True),
        (("--ready_requires", "none"), True, True),
    ],
)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_service_that_fails_at_the_start_counts_as_configured(
    tmp_path: Path, options: tuple[str, ...], *, required: bool, ready: bool, workers: str
) -> None:
    ir.save(ir.dummy(), tmp_path, "dummy")
    typo = {"name": "typo", "base_path": "dumy", "required": required}
    config = write_config(tmp_path, {"name": "dummy", "base_path": "dummy"}, typo)
    arguments = ("--config_path", str(config), "--workers", workers, *options)
    with serving(*arguments, ready=False, log=tmp_path / "log") as server:
        until(lambda: server.answers("/v2/models/dummy/ready"))
        until(lambda: "typo" in _listed(server))
        if ready:
            until(lambda: server.answers("/v2/health/ready"))
            assert _ready(server) == [True] * 5
        else:
            until(lambda: "typo" in server.get("/v2/health/ready").text)
            assert "does not exist" in server.get("/v2/health/ready").text
            assert _ready(server) == [False] * 5
