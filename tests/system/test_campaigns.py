from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.attacks.attacks import ATTACKS
from tests.attacks.measurement import measure
from tests.chaos.__main__ import chaos
from tests.chaos.ledger import CallOutcome
from tests.fuzz.campaign import Campaign, deliver, new_in_log, write_fuzzed
from tests.fuzz.cases import CASES
from tests.fuzz.grpc_calls import GrpcLane
from tests.fuzz.http_requests import HttpLane
from tests.support.processes import serving

Ports = tuple[int, int]
Served = tuple[Ports, Callable[[], str]]
FEW = range(2_000, 4_000)
MANY = range(1_000_000, 1_010_000)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve all kinds; the second value returns new lines of the log."""
    folder = tmp_path_factory.mktemp("fuzzed")
    with serving("--config_path", str(write_fuzzed(folder)), "--crash_probe", "off", log=folder / "log") as server:
        ports = int(server.grpc.rpartition(":")[2]), int(server.rest.rpartition(":")[2])
        yield ports, new_in_log(folder / "log")


@pytest.mark.parametrize("name", CASES)
def test_messages_of_earlier_faults_are_refused_or_answered(served: Served, name: str) -> None:
    ports, log = served
    grpc, http = GrpcLane(ports[0]), HttpLane(ports[1])
    try:
        (outcome,) = deliver((grpc, http), ports, [CASES[name]])
    finally:
        grpc.close()
        http.close()
    assert outcome.kinds
    assert (outcome.faults, list(Campaign(ports, log).faults_afterwards())) == ([], [])


@pytest.mark.parametrize(
    "numbers", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=lambda numbers: str(len(numbers))
)
def test_nearly_right_messages_cause_no_fault_of_the_server(served: Served, numbers: range) -> None:
    ports, log = served
    report = Campaign(ports, log).run(numbers)
    assert not report.violations, report
    interfaces = {interface for interface, _ in report.counts}
    assert {
        "rest kserve",
        "rest generate_stream",
        "rest tensorflow",
        "rest paddle",
        "handlers",
        "rest admin",
    } <= interfaces
    assert {"openai chat", "openai completions", "openai responses", "openai others"} <= interfaces
    assert {
        "raw http",
        "raw http2",
        "grpc GRPCInferenceService/ModelInfer",
        "grpc PredictionService/Predict",
    } <= interfaces


GROWTH = 1.25
KEPT = 0.05
"""An allocator keeps some pages of the gigabytes that an attack makes a server allocate, which may be more than a
quarter of the memory of a server that has just started."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_stops_no_other_client_and_leaves_no_memory(tmp_path: Path, name: str) -> None:
    measured = measure(name, tmp_path, quiet_seconds=2.0)
    assert measured.attacked.count > 0
    assert measured.growth < GROWTH or measured.kept < KEPT, measured


@pytest.mark.slow
async def test_a_minute_of_all_disturbances(tmp_path: Path) -> None:
    report = await chaos(tmp_path, 60, 7)
    assert report.ledger.violations() == [], report
    assert sum(count for (_, outcome), count in report.ledger.counts.items() if outcome is CallOutcome.RIGHT) > 1_000
