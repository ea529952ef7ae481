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


def test_deploy_writes_a_file_for_the_commands_of_ray(tmp_path: Path) -> None:
    config, output = _configuration(tmp_path), tmp_path / "serve.yaml"
    options = ["--setting", "hide_errors=true"]
    done = run_ovms("deploy", "ray", str(config), "--output", str(output), *options, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    document = yaml.safe_load(output.read_text())
    (application,) = document["applications"]
    assert application["import_path"] == "ovmstrio.cluster.ray.application:application"
    assert application["args"] == {"config": str(config), "settings": {"hide_errors": "true"}, "ingress": {}}
    assert document["grpc_options"]["grpc_servicer_functions"] == ["ovmstrio.cluster.ray.grpc_services.add_services"]


def test_paths_of_settings_are_absolute(tmp_path: Path) -> None:
    config, output = tmp_path / "current.json", tmp_path / "serve.yaml"
    config.symlink_to(_configuration(tmp_path))
    options = ["--setting", "cache_dir=kept", "--setting", "server_name=kept"]
    done = run_ovms("deploy", "ray", str(config), "--output", str(output), *options, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    (application,) = yaml.safe_load(output.read_text())["applications"]
    settings = {"cache_dir": str(Path.cwd() / "kept"), "server_name": "kept"}
    assert application["args"] == {"config": str(config), "settings": settings, "ingress": {}}


@pytest.mark.parametrize(
    ("settings", "options", "code", "reason"),
    [
        (
            {"stateful": True, "placement": {"autoscaling": {"max_replicas": 2}}},
            (),
            1,
            '"m" has sequences, which are shared out among a fixed number of replicas',
        ),
        ({}, ("--setting", "rest_port=1"), 1, "settings that have no meaning in a replica: rest_port"),
        ({}, ("--address", "127.0.0.1:{free}"), 2, "there is no cluster at 127.0.0.1:{free}: "),
    ],
    ids=["sequences", "setting of a server", "no cluster"],
)
def test_a_deployment_that_cannot_work_is_refused(
    tmp_path: Path, settings: dict[str, object], options: tuple[str, ...], code: int, reason: str
) -> None:
    (free,) = free_ports(1)
    config = str(_configuration(tmp_path, **settings))
    arguments = [option.format(free=free) for option in options]
    done = run_ovms("deploy", "ray", config, *arguments, timeout=PATIENCE_SECONDS)
    assert done.returncode == code, done.stderr
    assert reason.format(free=free) in done.stdout + done.stderr
