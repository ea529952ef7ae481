"""`ovms deploy ray` before there is a cluster: what it needs, what it refuses, and the file that it writes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.support.ports import free_ports
from tests.support.processes import run_ovms

PATIENCE_SECONDS = 300
pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")


def _configuration(folder: Path, **settings: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_config_list": [{"config": {"name": "m", "base_path": "m", **settings}}]}))
    return path


def test_the_file_for_rays_own_commands_names_what_is_served(tmp_path: Path) -> None:
    """Nothing is deployed for it, and no cluster is needed."""
    config, output = _configuration(tmp_path), tmp_path / "serve.yaml"
    done = run_ovms(
        "deploy", "ray", str(config), "--output", str(output), "--setting", "hide_errors=true", timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    document = yaml.safe_load(output.read_text())
    (application,) = document["applications"]
    assert application["import_path"] == "ovmstrio.cluster.ray.application:application"
    assert application["args"] == {"config": str(config), "settings": {"hide_errors": "true"}, "ingress": {}}
    assert document["grpc_options"]["grpc_servicer_functions"] == ["ovmstrio.cluster.ray.grpc_services.add_services"]


def test_paths_of_settings_are_written_so_that_they_mean_the_same_elsewhere(tmp_path: Path) -> None:
    """The processes of a cluster begin in other folders."""
    config, output = tmp_path / "current.json", tmp_path / "serve.yaml"
    config.symlink_to(_configuration(tmp_path))
    options = ["--setting", "cache_dir=kept", "--setting", "server_name=kept"]
    done = run_ovms("deploy", "ray", str(config), "--output", str(output), *options, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    (application,) = yaml.safe_load(output.read_text())["applications"]
    settings = {"cache_dir": str(Path.cwd() / "kept"), "server_name": "kept"}
    assert application["args"] == {"config": str(config), "settings": settings, "ingress": {}}


def test_what_a_cluster_cannot_serve_is_told_with_its_place(tmp_path: Path) -> None:
    """Before anything is deployed."""
    config = _configuration(tmp_path, stateful=True, placement={"autoscaling": {"max_replicas": 2}})
    done = run_ovms("deploy", "ray", str(config), timeout=PATIENCE_SECONDS)
    assert done.returncode == 1
    assert '"m" has sequences, which are shared out among a fixed number of replicas' in done.stdout
    assert "config.json:1" in done.stdout


def test_settings_without_a_meaning_in_a_replica_are_refused(tmp_path: Path) -> None:
    """Such as ports, which are Ray's."""
    done = run_ovms(
        "deploy", "ray", str(_configuration(tmp_path)), "--setting", "rest_port=1", timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 1
    assert "settings that have no meaning in a replica: rest_port" in done.stdout


def test_an_address_where_nobody_listens_is_told_at_once(tmp_path: Path) -> None:
    """Ray itself would look for some minutes."""
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    done = run_ovms("deploy", "ray", str(_configuration(tmp_path)), "--address", address, timeout=PATIENCE_SECONDS)
    assert done.returncode == 2
    assert f"there is no cluster at {address}: " in done.stderr
    assert "start one with: ray start --head" in done.stderr
