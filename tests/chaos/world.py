"""Servers of a chaos run: configurations, folders and successive processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from unittest.mock import patch

import psutil

from tests.attacks.attacked_server import write_attacked
from tests.attacks.attacks import ATTACKS
from tests.fuzz.campaign import tracebacks
from tests.support import ir
from tests.support.all_kinds import write_all_kinds
from tests.support.ports import free_ports
from tests.support.processes import OvmsProcess, running
from tests.support.projects import write_project
from tests.support.waits import WAIT_SECONDS

FAKETIME: Final = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
SMALL_DISK: Final = "16M"
PROCESSES: Final = 2
ATTACKED: Final = "attacked"
"""The folder of services whose code fails as attackers want it."""


@dataclass(frozen=True, slots=True)
class Resources:
    resident_mb: float
    descriptors: int
    processes: int

    def __str__(self) -> str:
        return f"{self.resident_mb:.0f} MB, {self.descriptors} descriptors, {self.processes} processes"


class Server:
    def __init__(self, arguments: Sequence[str], ports: tuple[int, int], log: Path, clock: Path | None = None) -> None:
        self._arguments = arguments
        self.grpc, self.rest = ports
        self._log = log
        self._clock = clock
        self._life = ExitStack()
        self._process: OvmsProcess | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.process.poll() is None

    def start(self) -> None:
        with _clock_of(self._clock):
            serving = running(*self._arguments, grpc=self.grpc, rest=self.rest, log=self._log)
            self._process = self._life.enter_context(serving)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self._process is not None
        try:
            code, _ = self._process.stop(number)
        except subprocess.TimeoutExpired:
            code = -1
        self._life.close()
        return code

    def close(self) -> None:
        self._life.close()

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def resources(self) -> Resources:
        processes = [psutil.Process(self.pid), *self.children()]
        return Resources(
            sum(each.memory_info().rss for each in processes) / 1e6,
            sum(each.num_fds() for each in processes),
            len(processes),
        )

    def faults_in_log(self) -> list[str]:
        written = self._log.read_text(errors="replace")
        os.truncate(self._log, 0)
        return [each for each in tracebacks(written) if f"/{ATTACKED}/" not in each]


@contextmanager
def _clock_of(difference: Path | None) -> Iterator[None]:
    if difference is None:
        yield
        return
    named = {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(difference),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    with patch.dict(os.environ, named):
        yield


@contextmanager
def small_disk(folder: Path) -> Iterator[str]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_SECONDS)
    except OSError as error:
        yield str(error)
        return
    if done.returncode:
        yield done.stderr.strip()
        return
    try:
        yield ""
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False, timeout=WAIT_SECONDS)


def everything(folder: Path, disk: Path, clock: Path | None) -> Server:
    config = write_all_kinds(folder)
    document = json.loads(config.read_text())
    path = ir.save(ir.accumulator(), folder / "repository", "stateful")
    stateful = {"name": "stateful", "base_path": str(path), "stateful": True}
    document["model_config_list"].append({"config": stateful})
    (folder / ATTACKED).mkdir()
    keys = {name: given for attack in ATTACKS.values() for name, given in attack.graph_keys.items()}
    for key, entries in json.loads(write_attacked(folder / ATTACKED, graph_keys=keys).read_text()).items():
        document[key] += entries
    config.write_text(json.dumps(document, indent=1))
    grpc, rest = free_ports(2)
    arguments = ["serve", "--config_path", str(config), "--port", str(grpc), "--rest_port", str(rest)]
    arguments += ["--grpc_bind_address", "127.0.0.1", "--rest_bind_address", "127.0.0.1"]
    arguments += ["--file_system_poll_wait_seconds", "0.2", "--sequence_store", str(disk / "sequences")]
    return Server([*arguments, "--cache_dir", str(disk / "cache")], (grpc, rest), disk / "log", clock)


def project(folder: Path) -> Server:
    code = "class Handler:\n    def handle_post(self, payload):\n        return sum(payload)\n"
    file = write_project(folder / "project", code, processes=PROCESSES, threads_per_process=4)
    unused, rest = free_ports(2)
    arguments = ["serve", str(file), "--port", str(rest), "--rest_bind_address", "127.0.0.1"]
    arguments += ["--readiness_file", str(folder / "ready.txt")]
    return Server(arguments, (unused, rest), folder / "project.log")
