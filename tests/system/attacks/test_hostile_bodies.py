"""Cost of hostile bodies of all sizes for a server and its neighbours, at every REST route.

By default each route gets a part of the shapes.  ``OVMSTRIO_ALL_HOSTILE_BODIES=1`` runs the full product with the
strict bounds: it takes more than an hour, and needs a machine on which nothing else runs.
"""

from __future__ import annotations

import gzip
import http.client
import os
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from tests.attacks.measuring import Latencies, Watch, neighbour
from tests.attacks.ports import Ports
from tests.support.hostile_bodies import FORMS, HEADERS, ROUTES, SHAPES, bodies
from tests.support.hostile_services import write_hostile_services
from tests.support.processes import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ALLOWANCE_SECONDS = 0.02
SECONDS_A_BYTE = 50e-9
SECONDS_OF_VALUES = 0.06
"""Of as many values, lists and members as a document may have, which are in a megabyte and in sixty alike."""
ALL = bool(os.environ.get("OVMSTRIO_ALL_HOSTILE_BODIES"))
NOISE = 1.0 if ALL else 2.0
"""Tests that run at the same time make the same work take more CPU."""
DELAY_MS = 20.0 if ALL else 200.0
PART = 1 if ALL else 5
"""Each route gets every so many shapes by default, and each shape some routes."""
TRIES = 3
QUIET_SECONDS = 2.0
MIB = 2**20


class Attacked:
    """A server process and what its calls cost."""

    def __init__(self, ports: Ports, pid: int) -> None:
        self.ports = ports
        self.watch = Watch(pid)

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> int:
        """Post a body; returns the length of the answer."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.ports.rest, timeout=120)) as connection:
            connection.request("POST", path, body, headers)
            with connection.getresponse() as answer:
                return len(answer.read())

    def excess_seconds(self, path: str, body: bytes, headers: dict[str, str], size: int) -> float:
        """Return the CPU seconds that a body costs beyond what it may, the least of some tries."""
        least = float("inf")
        for _ in range(TRIES):
            before = self.watch.cpu_seconds
            answered = self.post(path, body, headers)
            may = NOISE * (ALLOWANCE_SECONDS + SECONDS_OF_VALUES + (size + answered) * SECONDS_A_BYTE)
            least = min(least, self.watch.cpu_seconds - before - may)
            if least <= 0:
                break
        return least


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """Serve a service of every kind but text models in a process of its own."""
    folder = tmp_path_factory.mktemp("attacked")
    options = ["--model_control", "explicit", "--load_model", "*", "--allow_shared_memory"]
    with serving("--config_path", str(write_hostile_services(folder)), *options, log=folder / "log") as server:
        ports = Ports(int(server.grpc.rpartition(":")[2]), int(server.rest.rpartition(":")[2]))
        yield Attacked(ports, server.process.pid)


def shapes_of(name: str, part: int = PART) -> list[tuple[int, str]]:
    """Return the shapes that a route gets, with their numbers."""
    return list(enumerate(SHAPES))[list(ROUTES).index(name) % part :: part]


SIZES = {"1 MiB": MIB, "16 MiB": 16 * MIB, "60 MiB": 60 * MIB}


@pytest.mark.parametrize("size", [SIZES[name] for name in (SIZES if ALL else ["1 MiB"])])
@pytest.mark.parametrize("name", ROUTES)
def test_a_body_costs_no_more_than_its_bytes(attacked: Attacked, name: str, size: int) -> None:
    """CPU of the server, its workers included, for all shapes at all places; one place for the largest bodies."""
    route, wrong = ROUTES[name], []
    for number, shape in shapes_of(name):
        places = route.places if ALL and size == MIB else route.places[number % len(route.places) :][:1]
        for place in places:
            body = bodies(route, place, shape, size)
            excess = attacked.excess_seconds(route.paths[0], body, HEADERS, len(body))
            if excess > 0:
                wrong.append(f"{shape} at {place!r}: {excess * 1e3:.0f} ms too much")
    assert not wrong


@pytest.mark.parametrize("name", ROUTES if ALL else ["infer", "predict", "handler", "ops"])
def test_a_large_body_costs_no_more_than_its_bytes(attacked: Attacked, name: str) -> None:
    """CPU of the server for 16 MiB of some shapes."""
    route, wrong = ROUTES[name], []
    for number, shape in shapes_of(name, 4 * PART):
        body = bodies(route, route.places[number % len(route.places)], shape, 16 * MIB)
        excess = attacked.excess_seconds(route.paths[0], body, HEADERS, len(body))
        if excess > 0:
            wrong.append(f"{shape}: {excess * 1e3:.0f} ms too much")
    assert not wrong


@pytest.mark.parametrize("size", [MIB, 16 * MIB] if ALL else [MIB])
def test_a_form_costs_no_more_than_its_bytes(attacked: Attacked, size: int) -> None:
    """Forms and texts for handlers."""
    wrong = []
    for name, (content_type, make) in FORMS.items():
        body = make(size)
        excess = attacked.excess_seconds("/handler", body, {"Content-Type": content_type}, len(body))
        if excess > 0:
            wrong.append(f"{name}: {excess * 1e3:.0f} ms too much")
    assert not wrong


NEIGHBOURED = ["infer", "predict", "handler", "ops"]
if ALL:
    NEIGHBOURED += ["predict rows", "generate", "chat", "payload", "load", "logging"]


@pytest.mark.parametrize("name", NEIGHBOURED)
def test_a_neighbour_is_hardly_delayed(attacked: Attacked, name: str) -> None:
    """The slowest hundredth of its calls takes at most some milliseconds longer, plain and compressed."""
    route = ROUTES[name]
    delays = []
    for _ in range(TRIES):
        quiet, busy = list[float](), list[float]()
        with neighbour(attacked.ports, quiet, model="model"):
            threading.Event().wait(QUIET_SECONDS)
        with neighbour(attacked.ports, busy, model="model"):
            for number, shape in shapes_of(name):
                body = bodies(route, route.places[number % len(route.places)], shape, 2 * MIB)
                if number % 4:
                    attacked.post(route.paths[0], body, HEADERS)
                else:
                    attacked.post(route.paths[0], gzip.compress(body, 1), {**HEADERS, "Content-Encoding": "gzip"})
        delays.append(Latencies.of(busy).p99 - Latencies.of(quiet).p99)
        if delays[-1] <= DELAY_MS:
            break
    assert min(delays) <= DELAY_MS, delays
