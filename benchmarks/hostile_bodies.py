"""CPU time of hostile REST bodies, in multiples of the limit for their size."""

from __future__ import annotations

import gzip
import http.client
import tempfile
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import Row
from tests.attacks.attacked_server import Ports
from tests.attacks.measurement import Latencies, Watch, neighbour
from tests.support.all_kinds import write_hostile_services
from tests.support.hostile_bodies import FORMS, HEADERS, ROUTES, SHAPES, bodies
from tests.support.processes import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

ALLOWANCE_SECONDS = 0.02
SECONDS_A_BYTE = 50e-9
SECONDS_OF_VALUES = 0.06
"""Bodies with the maximum number of values, lists and members, in one megabyte and in sixty."""
DELAY_MS = 20.0
TRIES = 3
QUIET_SECONDS = 2.0
MIB = 2**20
SIZES = {"1 MiB": MIB, "16 MiB": 16 * MIB, "60 MiB": 60 * MIB}


class AttackedServer:
    """A server process with the cost of its calls."""

    def __init__(self, ports: Ports, pid: int) -> None:
        self.ports = ports
        self.watch = Watch(pid)

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> int:
        """Post a body; returns the length of the answer."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.ports.rest, timeout=120)) as connection:
            connection.request("POST", path, body, headers)
            with connection.getresponse() as answer:
                return len(answer.read())

    def cost(self, path: str, body: bytes, headers: dict[str, str]) -> float:
        """Return the CPU time of a body in multiples of its limit, as the minimum of some tries."""
        least = float("inf")
        for _ in range(TRIES):
            before = self.watch.cpu_seconds
            answered = self.post(path, body, headers)
            may = ALLOWANCE_SECONDS + SECONDS_OF_VALUES + (len(body) + answered) * SECONDS_A_BYTE
            least = min(least, (self.watch.cpu_seconds - before) / may)
            if least <= 1:
                break
        return least

    def delay_ms(self, name: str) -> float:
        """Return the increase of another client's p99, for plain and compressed bodies."""
        route, quiet, busy = ROUTES[name], list[float](), list[float]()
        with neighbour(self.ports, quiet, model="model"):
            threading.Event().wait(QUIET_SECONDS)
        with neighbour(self.ports, busy, model="model"):
            for number, shape in enumerate(SHAPES):
                body = bodies(route, route.places[number % len(route.places)], shape, 2 * MIB)
                if number % 4:
                    self.post(route.paths[0], body, HEADERS)
                else:
                    self.post(route.paths[0], gzip.compress(body, 1), {**HEADERS, "Content-Encoding": "gzip"})
        return Latencies.of(busy).p99 - Latencies.of(quiet).p99


def _costs(attacked: AttackedServer, name: str, size: int) -> Iterator[tuple[float, str]]:
    """Measure all shapes; small bodies at all places of the route, large ones at one place."""
    route = ROUTES[name]
    for number, shape in enumerate(SHAPES):
        for place in route.places if size == MIB else route.places[number % len(route.places) :][:1]:
            yield attacked.cost(route.paths[0], bodies(route, place, shape, size), HEADERS), f"{shape} at {place!r}"


def _form_costs(attacked: AttackedServer, size: int) -> Iterator[tuple[float, str]]:
    for name, (content_type, make) in FORMS.items():
        yield attacked.cost("/handler", make(size), {"Content-Type": content_type}), name


def _row(what: str, costs: Iterator[tuple[float, str]]) -> Row:
    cost, worst = max(costs)
    return Row(f"hostile bodies: {what}; CPU time in multiples of the allowed", cost, "<= 1", cost <= 1, worst)


def run() -> list[Row]:
    """Measure all routes of one server."""
    rows = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        options = ["--model_control", "explicit", "--load_model", "*", "--allow_shared_memory"]
        config = str(write_hostile_services(folder))
        with serving("--config_path", config, *options, log=folder / "log") as server:
            ports = Ports(int(server.grpc.rpartition(":")[2]), int(server.rest.rpartition(":")[2]))
            attacked = AttackedServer(ports, server.process.pid)
            for name in ROUTES:
                rows += [_row(f"{name}, {title}", _costs(attacked, name, size)) for title, size in SIZES.items()]
                delay = min(attacked.delay_ms(name) for _ in range(TRIES))
                what = f"hostile bodies: {name}; ms that a neighbour's p99 grows by"
                rows.append(Row(what, delay, f"<= {DELAY_MS:.0f}", delay <= DELAY_MS, f"least of {TRIES}"))
            rows += [_row(f"forms, {title}", _form_costs(attacked, SIZES[title])) for title in ("1 MiB", "16 MiB")]
    return rows
