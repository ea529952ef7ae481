"""Cost of a start: seconds until three models are ready, if known, unknown, and without crash probes.

The CPU time of each start is compared with that of one Python process that only imports OpenVINO, reads and compiles
the same models.

python -m benchmarks.first_loads [OTHER], a checkout that has an environment in ``.venv`` and is measured in turn
"""

from __future__ import annotations

import http.client
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from benchmarks.models import resnet50, trivial, write_repository
from tests.support.ports import free_ports

__all__: list[str] = []

HERE: Final = Path(__file__).parents[1]
ALONE: Final = "OpenVINO alone: import, read, compile"
HELP: Final = "ovms --help"
ROUNDS: Final = 5
START_SECONDS: Final = 120
OPENVINO_ALONE: Final = """
import json, sys
from pathlib import Path
sys.modules["openvino_telemetry"] = None
import openvino
core, compiled = openvino.Core(), []
for entry in json.loads(Path(sys.argv[1]).read_text())["model_config_list"]:
    config = entry["config"]
    model = core.read_model(next(Path(config["base_path"]).glob("*/*.xml")))
    compiled.append(core.compile_model(model, "CPU", {"PERFORMANCE_HINT": "LATENCY", **config["plugin_config"]}))
"""


@dataclass(frozen=True, slots=True)
class _Case:
    """A start variant: label, checkout, options, and whether the models are known."""

    name: str
    checkout: Path
    options: tuple[str, ...] = ()
    is_known: bool = False


def _cases(other: Path | None) -> list[_Case]:
    cached = ("--cache_dir", "blobs")
    cases = [
        _Case("known", HERE, is_known=True),
        _Case("--crash_probe off", HERE, ("--crash_probe", "off")),
        _Case("unknown", HERE),
        _Case("unknown, --cache_dir", HERE, cached),
        _Case("--crash_probe off, --cache_dir that is empty", HERE, (*cached, "--crash_probe", "off")),
    ]
    return cases if other is None else [_Case("the other checkout", other), *cases]


def _start(case: _Case, config: Path, cache: Path) -> tuple[float, float]:
    """Start a server once; return the seconds and the CPU seconds until it is ready."""
    grpc, rest = free_ports(2)
    command = [str(case.checkout / ".venv" / "bin" / "ovms"), "serve", "--config_path", str(config)]
    command += ["--port", str(grpc), "--rest_port", str(rest), "--log_level", "ERROR", *case.options]
    before = time.perf_counter()
    environment = {**_environment(), "XDG_CACHE_HOME": str(cache)}
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=cache, env=environment, stdout=quiet, stderr=quiet) as process:
        try:
            _wait_ready(process, rest)
            seconds = time.perf_counter() - before
            used = _used(psutil.Process(process.pid))
        finally:
            process.terminate()
    return seconds, used


def _environment() -> dict[str, str]:
    """Return the environment; a developer's shell may disable writing bytecode, which installed packages have."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _run(*command: str) -> tuple[float, float]:
    """Run a command once; return its seconds and its CPU seconds."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=_environment(), stdout=subprocess.DEVNULL, check=True)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _used(server: psutil.Process) -> float:
    """Return the CPU seconds of a server and its processes, including exited ones."""
    processes = [server, *server.children(recursive=True)]
    return sum(sum(each.cpu_times()[:4]) for each in processes)


def _wait_ready(process: subprocess.Popen[bytes], port: int) -> None:
    ends = time.monotonic() + START_SECONDS
    while time.monotonic() < ends and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)
        try:
            connection.request("GET", "/v2/health/ready")
            if connection.getresponse().status == http.client.OK:
                return
        except OSError:
            pass
        threading.Event().wait(0.01)
    sys.exit("the server did not become ready")


def _measure(other: Path | None) -> dict[str, list[tuple[float, float]]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = {"trivial": trivial(), "resnet": resnet50(), "small": trivial()}
        config = write_repository(folder, models, {})
        cases = _cases(other)
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in (ALONE, HELP)}
        taken |= {case.name: [] for case in cases}
        known = folder / "known"
        known.mkdir()
        _start(_Case("first", HERE), config, known)
        for _ in range(ROUNDS):
            taken[ALONE].append(_run(sys.executable, "-c", OPENVINO_ALONE, str(config)))
            taken[HELP].append(_run(str(HERE / ".venv" / "bin" / "ovms"), "--help"))
            for case in cases:
                with tempfile.TemporaryDirectory(dir=folder) as fresh:
                    taken[case.name].append(_start(case, config, known if case.is_known else Path(fresh)))
    return taken


def _main() -> None:
    taken = _measure(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None)
    alone = statistics.median(used for _, used in taken[ALONE])
    print("| start | seconds until ready | of processors | to OpenVINO alone |\n|---|---|---|---|")
    for name, figures in taken.items():
        seconds, used = (statistics.median(each) for each in zip(*figures, strict=True))
        print(f"| {name} | {seconds:.2f} | {used:.2f} | {used / alone:.2f} |")


if __name__ == "__main__":
    _main()
