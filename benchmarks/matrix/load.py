"""Load generation with h2load, which needs little CPU and supports HTTP/2 and HTTP/1.1."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from benchmarks.processes import cpu_of_tree, need

if TYPE_CHECKING:
    import psutil

    from benchmarks.matrix.infer_requests import InferCall
    from ovmstrio.core.tensor import Array

__all__ = ["LoadFigures", "load"]

_CALLS_A_CONNECTION: Final = 8
_LONGER: Final = (1, 4, 16)
_SUCCEEDED: Final = re.compile(r"(\d+) succeeded, (\d+) failed, (\d+) errored")
_REFUSED: Final = re.compile(r"(\d+) 4xx, (\d+) 5xx")
_DATA: Final = re.compile(r"\((\d+)\) data")
_LEAST_DATA: Final = 0.999


class LoadFigures(NamedTuple):
    """Result of a load: calls per second, and the server's CPU per call, median and p99 in microseconds."""

    rate: float
    cpu_us: float
    p50_us: float
    p99_us: float


def load(call: InferCall, concurrency: int, seconds: float, server: psutil.Process) -> LoadFigures:
    """Send load for the given time and concurrency, or longer until the first response.

    Over HTTP/2 eight calls share a connection, over HTTP/1.1 each has its own.  Exits if a call fails.  h2load does
    not read the status of gRPC, so its responses must have as much data as that of one call before.
    """
    streams = 1 if call.is_http1 else min(concurrency, _CALLS_A_CONNECTION)
    connections = max(1, concurrency // streams)
    command = [need("h2load", "nghttp2-client"), "-d", str(call.body), *(["--h1"] if call.is_http1 else [])]
    command += [word for header in call.headers for word in ("-H", header)]
    _, data_bytes = _calls([*command, "-n", "1", call.url])
    command += ["-c", str(connections), "-m", str(streams)]
    for longer in _LONGER:
        before = cpu_of_tree(server)
        calls, received = _calls([*command, "-D", f"{longer * seconds * 1e3:.0f}ms", call.url])
        if not call.is_http1 and received < _LEAST_DATA * max(data_bytes, 1) * len(calls):
            sys.exit(f"{call.url}: {received} bytes of {len(calls)} responses, {data_bytes} expected of each")
        used = cpu_of_tree(server) - before
        if len(calls):
            return _figures(calls, used)
    sys.exit(f"{call.url}: no answer in {_LONGER[-1] * seconds:g} s")


def _calls(command: list[str]) -> tuple[Array, int]:
    """Run h2load; return a row for each call (start, status, and latency in microseconds), and the bytes of bodies."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "calls"
        done = subprocess.run([*command, f"--log-file={log}"], capture_output=True, text=True, check=True)
        found, refused, data = (each.search(done.stdout) for each in (_SUCCEEDED, _REFUSED, _DATA))
        if found is None or refused is None or data is None or any(map(int, (*found.groups()[1:], *refused.groups()))):
            sys.exit(f"not every call succeeded:\n{done.stdout}")
        calls = np.loadtxt(log, dtype=np.int64, ndmin=2) if int(found[1]) else np.empty((0, 3), np.int64)
        return calls, int(data[1])


def _figures(calls: Array, used: float) -> LoadFigures:
    begins, took = calls[:, 0], calls[:, 2]
    span = ((begins + took).max() - begins.min()) / 1e6
    p50, p99 = np.percentile(took, [50, 99])
    return LoadFigures(len(calls) / span, used / len(calls) * 1e6, float(p50), float(p99))
