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


PATIENCE_SECONDS = 300

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

CASES: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"ingress": {"group": "ingress"}, "several": True}, ""),
    ({"ingress": {"replicas": 2}, "several": True}, ""),
    ({"settings": {"max_message_size": "much"}}, "settings.max_message_size: the value cannot be used"),
    ({"settings": {"max_message_size": 1}}, "(expected 1024 or more, found 1)"),
    ({"settings": {"port": 1}}, "settings that have no meaning in a replica: port"),
    ({"setting": {}}, "setting: the value cannot be used (expected one of config, settings, ingress"),
    ({"ingress": []}, "ingress: the value cannot be used"),
    ({"ingress": {"replicas": 0}}, "ingress.replicas: the value cannot be used (expected 1 or more, found 0)"),
    ({"ingress": "x", "several": True}, 'the group in front of all others is "ingress"'),
    ({"ingress": {"replicas": 2}}, 'say it in the "placement" of "m"'),
]


def test_arguments_that_cannot_be_used_or_would_be_ignored_are_refused(tmp_path: Path) -> None:
    entries = [{"config": {"name": name, "base_path": name}} for name in ("m", "n")]
    for name, count in (("one", 1), ("two", 2)):
        (tmp_path / name).write_text(json.dumps({"model_config_list": entries[:count]}))
    given = [{"config": str(tmp_path / ("two" if "several" in args else "one")), **args} for args, _ in CASES]
    for args in given:
        args.pop("several", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for (_, expected), problems in zip(CASES, json.loads(done.stdout), strict=True):
        assert bool(problems) == bool(expected), problems
        assert expected in "".join(problems)
