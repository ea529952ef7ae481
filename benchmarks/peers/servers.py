"""Compared servers: each runs all models in a separate process on its own ports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import psutil

from benchmarks.peers.environments import python_of
from benchmarks.processes import ended
from tests.support.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NAMES", "OURS", "Peer", "peer"]

OURS: Final = "ovmstrio"
NAMES: Final = (OURS, "kserve", "mlserver", "litserve", "bentoml")
_PROGRAMS: Final = Path(__file__).with_name("programs")
_READY_PATHS: Final = {
    OURS: "/v2/health/ready",
    "kserve": "/v2/health/ready",
    "mlserver": "/v2/health/ready",
    "litserve": "/health",
    "bentoml": "/readyz",
}
_START_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A running server, with the seconds until it was ready.

    Attributes:
        speaks_v2: whether it speaks the Open Inference Protocol, over gRPC and HTTP.
    """

    name: str
    process: psutil.Process
    grpc: int
    rest: int
    ready_seconds: float
    speaks_v2: bool

    @property
    def proportional_mb(self) -> float:
        """Return the memory of all its processes, with shared pages counted once."""
        processes = [self.process, *self.process.children(recursive=True)]
        return float(sum(each.memory_full_info().pss for each in processes) / 1e6)


@contextmanager
def peer(name: str, config: Path, models: dict[str, Path], settings: dict[str, str]) -> Iterator[Peer]:
    """Run a server with models until the block ends; exit if it does not become ready.

    Args:
        name: one of :data:`NAMES`.
        config: a ``config.json`` with the models; its folder may receive other files.
        models: the model files by name.
        settings: the settings of OpenVINO.
    """
    grpc, rest, metrics = free_ports(3)
    launch: dict[str, Any] = {"models": {each: str(path) for each, path in models.items()}, "settings": settings}
    launch |= {"grpc": grpc, "rest": rest, "metrics": metrics}
    folder = config.parent / name
    folder.mkdir(exist_ok=True)
    command = _command(name, config, folder, launch)
    environment = {
        **os.environ,
        "PEER": json.dumps(launch),
        "PYTHONPATH": str(_PROGRAMS),
        "BENTOML_DO_NOT_TRACK": "true",
    }
    if name == OURS:
        del environment["PYTHONPATH"]
    begin = time.perf_counter()
    with (folder / "log").open("wb") as log:
        where = folder if name != OURS else None
        process = subprocess.Popen(command, cwd=where, env=environment, stdout=log, stderr=log, start_new_session=True)
        with _no_children_left(process.pid), ended(process):
            _wait_ready(name, process, rest, folder / "log")
            seconds = time.perf_counter() - begin
            speaks_v2 = name not in {"litserve", "bentoml"}
            yield Peer(name, psutil.Process(process.pid), grpc, rest, seconds, speaks_v2)


@contextmanager
def _no_children_left(group: int) -> Iterator[None]:
    """Kill the remaining processes of a server, which would disturb the next one."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _command(name: str, config: Path, folder: Path, launch: dict[str, Any]) -> list[str]:
    if name == OURS:
        ports = ["--port", str(launch["grpc"]), "--rest_port", str(launch["rest"])]
        return [
            sys.executable,
            "-m",
            "ovmstrio.cli",
            "serve",
            "--config_path",
            str(config),
            *ports,
            "--log_level",
            "ERROR",
        ]
    python = python_of(name)
    if name == "mlserver":
        _write_mlserver(folder, launch)
        return [str(python.with_name("mlserver")), "start", str(folder)]
    if name == "bentoml":
        return [
            str(python.with_name("bentoml")),
            "serve",
            "bentoml_program:ModelService",
            "--port",
            str(launch["rest"]),
        ]
    return [str(python), str(_PROGRAMS / f"{name}_program.py")]


def _write_mlserver(folder: Path, launch: dict[str, Any]) -> None:
    ports = {"http_port": launch["rest"], "grpc_port": launch["grpc"], "metrics_port": launch["metrics"]}
    # Neither its workers nor its compression support streams.
    chosen = {"host": "127.0.0.1", "parallel_workers": 0, "gzip_enabled": False}
    (folder / "settings.json").write_text(json.dumps({**ports, **chosen}))
    for name in launch["models"]:
        (folder / name).mkdir()
        about = {"name": name, "implementation": "mlserver_program.ServedModel"}
        (folder / name / "model-settings.json").write_text(json.dumps(about))


def _wait_ready(name: str, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    ends = time.monotonic() + _START_SECONDS
    while time.monotonic() < ends and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}{_READY_PATHS[name]}", timeout=_START_SECONDS).is_success:
                return
        except httpx.TransportError:
            pass
        threading.Event().wait(0.05)
    sys.exit(f"{name} did not become ready:\n{log.read_text(errors='replace')[-2000:]}")
