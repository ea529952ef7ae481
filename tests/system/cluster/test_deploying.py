"""`ovms deploy ray` where something is in its way: ports that are taken, other ports before, and models that fail."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import ir
from tests.support.ports import free_ports
from tests.support.ray_cluster import ray_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray"),
]


def _configuration(folder: Path, base_path: str) -> Path:
    path = folder / f"{base_path}.json"
    entry = {"name": "m", "base_path": base_path, "placement": {"num_cpus": 0.1}}
    path.write_text(json.dumps({"model_config_list": [{"config": entry}]}))
    return path


def test_a_failed_deployment_is_reported_in_a_line_and_leaves_nothing(tmp_path: Path) -> None:
    ir.save(ir.dummy(), tmp_path, "m")
    good, bad = _configuration(tmp_path, "m"), _configuration(tmp_path, "none")
    with ray_cluster() as cluster:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            refused = replace(cluster, http=port).deploy(good)
        assert refused.returncode == 1
        assert f"Ray's proxies cannot be started: RuntimeError: Failed to bind to address '127.0.0.1:{port}'" in (
            refused.stderr
        )
        deployed = cluster.deploy(good)
        assert deployed.returncode == 0, deployed.stderr
        assert f"http://127.0.0.1:{cluster.http}/, gRPC at port {cluster.grpc}" in deployed.stdout
        (other,) = free_ports(1)
        elsewhere = replace(cluster, http=other).deploy(good)
        assert (elsewhere.returncode, str(other) in elsewhere.stdout) == (0, False), elsewhere.stderr
        assert "its proxies keep the addresses that they were started with" in elsewhere.stderr
        failed = cluster.deploy(bad)
        assert failed.returncode == 1
        assert failed.stderr.strip().splitlines()[-1].startswith(f"error: {bad}:1: model_config_list[0]")
