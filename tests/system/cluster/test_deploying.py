from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support import ir
from tests.support.ports import free_ports
from tests.support.ray_cluster import ray_cluster

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")


def _configuration(folder: Path, base_path: str) -> Path:
    path = folder / f"{base_path}.json"
    entry = {"name": "m", "base_path": base_path, "placement": {"num_cpus": 0.1}}
    path.write_text(json.dumps({"model_config_list": [{"config": entry}]}))
    return path


@pytest.mark.slow
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


# Arguments


# Imported, Ray would leave much behind in this process.
PROGRAM = """
import json, sys
from ovmstrio.cluster.ray.application import application
from ovmstrio.core.errors import ConfigError
reported = []
for args in json.loads(sys.stdin.read()):
    try:
        application(args)
    except ConfigError as error:
        reported.append([str(problem) for problem in error.problems])
    else:
        reported.append([])
print(json.dumps(reported))
"""

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("one", {}, ""),
    ("two", {"ingress": {"group": "ingress"}}, ""),
    ("two", {"ingress": {"replicas": 2}}, ""),
    ("one", {"settings": {"max_message_size": "much"}}, "settings.max_message_size: the value cannot be used"),
    ("one", {"settings": {"max_message_size": 1}}, "(expected an integer of 1024 to 2147483647, found 1)"),
    ("one", {"settings": {"port": 1}}, "settings not supported in a replica: port"),
    ("one", {"setting": {}}, "setting: the value cannot be used (expected one of config, settings, ingress"),
    ("one", {"ingress": []}, "ingress: the value cannot be used"),
    (
        "one",
        {"ingress": {"replicas": 0}},
        "ingress.replicas: the value cannot be used (expected an integer of 1 to 100000, found 0)",
    ),
    ("two", {"ingress": "x"}, 'the ingress group must be named "ingress"'),
    ("one", {"ingress": {"replicas": 2}}, 'set the "placement" of "m"'),
]


def test_arguments_that_cannot_be_used_or_would_be_ignored_are_refused(tmp_path: Path) -> None:
    entries = [{"config": {"name": name, "base_path": name}} for name in ("m", "n")]
    for name, count in (("one", 1), ("two", 2)):
        (tmp_path / name).write_text(json.dumps({"model_config_list": entries[:count]}))
    given = json.dumps([{"config": str(tmp_path / name), **args} for name, args, _ in CASES])
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for (*_, expected), problems in zip(CASES, json.loads(done.stdout), strict=True):
        assert bool(problems) == bool(expected), problems
        assert expected in "".join(problems)
