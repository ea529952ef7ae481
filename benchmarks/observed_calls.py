"""Cost of an API key, and of tracing 1 % of calls, for a trivial gRPC call: CPU time of the server.

Three servers run concurrently and are called alternately in short intervals, so that other load affects all of them
equally.  Two equal processes differ by three percent because of memory layout, so the servers are restarted several
times.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from benchmarks.report import Row
from benchmarks.requests import framed_infer_request
from tests.support import ir
from tests.support.bare_http2 import BareConnection
from tests.support.plain_http import QuietHandler, answering_http
from tests.support.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["run"]

STARTS: Final = 5
ROUNDS: Final = 20
CALLS: Final = 100
CLIENTS: Final = 4
START_SECONDS: Final = 60.0
_PATH: Final = "/inference.GRPCInferenceService/ModelInfer"
_REQUEST: Final = framed_infer_request("m", "b", np.full((1, 10), 0.5, np.float32))[5:]
_PROCESS_CLOCK: Final = 2
"""Id of the Linux clock for the CPU time of all threads of a process."""


class _Server(NamedTuple):
    """A running server: process, port and the metadata of callers."""

    process: int
    port: int
    headers: Sequence[tuple[str, str]]

    def used(self) -> float:
        """Return its CPU time in seconds."""
        return time.clock_gettime((~self.process << 3) | _PROCESS_CLOCK)

    def ask(self, calls: int = CALLS) -> None:
        """Send a number of calls from each of several concurrent clients."""

        def ask() -> None:
            with BareConnection(self.port, timeout=START_SECONDS) as connection:
                for _ in range(calls):
                    answer = connection.ask(_PATH, _REQUEST, self.headers)
                    assert answer.status == "0", answer.headers

        clients = [threading.Thread(target=ask) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()

    def microseconds(self) -> float:
        """Return the current CPU time per call."""
        before = self.used()
        self.ask()
        return (self.used() - before) / (CALLS * CLIENTS) * 1e6


class _Collector(QuietHandler):
    """Collector that drops all spans."""

    def do_POST(self) -> None:  # noqa: N802 - the library's name
        """Accept spans."""
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()


@contextmanager
def _serving(
    folder: Path,
    options: Sequence[str] = (),
    headers: Sequence[tuple[str, str]] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[_Server]:
    port, rest = free_ports(2)
    ovms = str(Path(sys.executable).with_name("ovms"))
    command = [ovms, "serve", "--model_name", "m", "--model_path", "m", "--port", str(port), "--rest_port", str(rest)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        [*command, *options], cwd=folder, stdout=quiet, stderr=quiet, env={**os.environ, **(environment or {})}
    ) as process:
        try:
            server = _Server(process.pid, port, headers)
            _wait(server)
            yield server
        finally:
            process.terminate()


def _wait(server: _Server) -> None:
    ends = time.monotonic() + START_SECONDS
    while True:
        try:
            return _ask_once(server)
        except (OSError, AssertionError):
            if time.monotonic() > ends:
                raise
            threading.Event().wait(0.1)


def _ask_once(server: _Server) -> None:
    with BareConnection(server.port, timeout=START_SECONDS) as connection:
        answer = connection.ask(_PATH, _REQUEST, server.headers)
        assert answer.status == "0", answer.headers


def _key_in(folder: Path) -> str:
    """Write a key file with one caller and return the key."""
    ovms = str(Path(sys.executable).with_name("ovms"))
    made = subprocess.run(
        [ovms, "keys", "new", "caller", "--file", "keys.json"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return made.stdout.split()[-1]


def _measure() -> list[list[float]]:
    """Return the cost of a plain call, a call with a key, and a traced call in each round."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        ir.save(ir.dummy(), folder, "m")
        key = _key_in(folder)
        collector = stack.enter_context(answering_http(_Collector))
        traces = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector,
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": "0.01",
        }
        with_key = ("--keys_file", "keys.json"), (("authorization", f"Bearer {key}"),)
        servers = [
            stack.enter_context(_serving(folder)),
            stack.enter_context(_serving(folder, *with_key)),
            stack.enter_context(_serving(folder, environment=traces)),
        ]
        for server in [*servers, *servers]:
            server.ask(3 * CALLS)
        rounds = []
        for number in range(ROUNDS):
            turns = list(enumerate(servers))
            figures = {at: server.microseconds() for at, server in (turns[::-1] if number % 2 else turns)}
            rounds.append([figures[at] for at in range(len(servers))])
        return rounds


def run() -> list[Row]:
    """Measure, and compare with a call without a key or traces."""
    rounds = [each for _ in range(STARTS) for each in _measure()]
    plain, with_key, with_traces = (statistics.median(column) for column in zip(*rounds, strict=True))
    of_key = statistics.median(row[0] / row[1] for row in rounds)
    of_traces = statistics.median(row[0] / row[2] for row in rounds)
    return [
        Row(
            "gRPC, trivial model: with a key against without, by the server's CPU a call",
            of_key,
            ">= 0.93",
            of_key >= 0.93,
            f"{with_key:.0f} us with, {plain:.0f} us without",
        ),
        Row(
            "gRPC, trivial model: one call in a hundred traced against none, by the server's CPU a call",
            of_traces,
            ">= 0.98",
            of_traces >= 0.98,
            f"{with_traces:.0f} us with, {plain:.0f} us without",
        ),
    ]
