"""A Ray cluster for tests: its process, the command that deploys on it, and the ports of its proxies."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.support.ports import free_ports
from tests.support.processes import killed_if_late

_START_SECONDS = 300
_STORE_BYTES = 80_000_000
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


@dataclass
class RayCluster:
    address: str
    http: int
    grpc: int
    process: subprocess.Popen[str]
    commands: IO[str]
    answers: IO[str]

    def send_command(self, *words: str) -> str:
        with killed_if_late(self.process, _START_SECONDS):
            self.commands.write(" ".join(words) + "\n")
            self.commands.flush()
            return self.answers.readline().strip()

    def deploy(self, config: Path, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ovmstrio.cli", "deploy", "ray", str(config), "--address", self.address]
        command += ["--http_port", str(self.http), "--grpc_port", str(self.grpc), "--proxies", "HeadOnly", *options]
        environment = os.environ | _QUIET
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_START_SECONDS, check=False
        )


@contextmanager
def ray_cluster(nodes: int = 1) -> Iterator[RayCluster]:
    # Paths of sockets have few characters.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.ray_cluster", str(nodes)],
        env=os.environ | _QUIET | {"RAY_TMPDIR": folder},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with process.stdin as commands, process.stdout as answers:
            with killed_if_late(process, _START_SECONDS):
                line = answers.readline().split()
            assert line[:1] == ["address"], line
            http, grpc = free_ports(2)
            yield RayCluster(line[1], http, grpc, process, commands, answers)
    finally:
        try:
            process.wait(_START_SECONDS)
        finally:
            _end(process)
            shutil.rmtree(folder, ignore_errors=True)


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    """Run a cluster of one or two nodes on this machine until standard input ends.

    The argument is the number of nodes. It writes its address, and then answers each line by a line: ``kill`` ends the
    second node as a loss of power would, ``add`` starts another one, ``nodes`` and ``replicas GROUP`` count. Of the
    resource ``place`` each node has one, and of ``head`` the first one many.
    """
    os.environ.update(_QUIET | {"RAY_health_check_period_ms": "500"})
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    # Ray prints what becomes of its processes.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # It notes there where the last cluster of the machine is.
    (Path(os.environ["RAY_TMPDIR"]) / "ray").mkdir()
    options: dict[str, Any] = {"num_cpus": 2, "object_store_memory": _STORE_BYTES}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**options, "include_dashboard": False, "resources": {"head": 100, "place": 1}},
    )
    seconds = [cluster.add_node(**options, resources={"place": 1}) for _ in range(int(sys.argv[1]) - 1)]
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    try:
        print("address", cluster.address, file=answers, flush=True)
        for line in sys.stdin:
            word, *arguments = line.split()
            if word == "kill":
                cluster.remove_node(seconds.pop(), allow_graceful=False)
                answer = "killed"
            elif word == "add":
                seconds.append(cluster.add_node(**options, resources={"place": 1}))
                answer = "added"
            elif word == "nodes":
                answer = str(sum(bool(node["Alive"]) for node in ray.nodes()))
            else:
                deployment = serve.status().applications["ovms"].deployments[arguments[0]]
                answer = str(deployment.replica_states.get("RUNNING", 0))
            print(answer, file=answers, flush=True)
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
