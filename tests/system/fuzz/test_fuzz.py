"""Messages that are nearly right are refused with the client's fault, and the server is as before."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.fuzz.campaign import Campaign, deliver, new_in_log, tracebacks
from tests.fuzz.cases import CASES
from tests.fuzz.grpc_lane import GrpcLane
from tests.fuzz.http_lane import HttpLane
from tests.fuzz.making import make_message
from tests.fuzz.messages import Transport
from tests.fuzz.outcomes import Outcome
from tests.fuzz.served import write_fuzzed
from tests.support.processes import serving

Ports = tuple[int, int]
Served = tuple[Ports, Callable[[], str]]
FEW = range(2_000, 4_000)
MANY = range(1_000_000, 1_010_000)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve every kind; the second value gives what is new in the log."""
    folder = tmp_path_factory.mktemp("fuzzed")
    with serving("--config_path", str(write_fuzzed(folder)), "--trial_load", "off", log=folder / "log") as server:
        ports = int(server.grpc.rpartition(":")[2]), int(server.rest.rpartition(":")[2])
        yield ports, new_in_log(folder / "log")


@pytest.mark.e2e
@pytest.mark.parametrize("name", CASES)
def test_what_broke_the_server_once_is_refused_or_answered(served: Served, name: str) -> None:
    """No fault of the server's, nothing in its log, and the next plain call is right."""
    ports, log = served
    grpc, http = GrpcLane(ports[0]), HttpLane(ports[1])
    try:
        (outcome,) = deliver((grpc, http), ports, [CASES[name]])
    finally:
        grpc.close()
        http.close()
    assert outcome.kinds
    assert (outcome.faults, list(Campaign(ports, log).faults_afterwards())) == ([], [])


@pytest.mark.e2e
@pytest.mark.parametrize(
    "numbers", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=lambda numbers: str(len(numbers))
)
def test_nearly_right_messages_over_every_door_are_never_the_servers_fault(served: Served, numbers: range) -> None:
    """Each is answered or refused; no failure is the server's, none is in its log, and plain calls go on."""
    ports, log = served
    report = Campaign(ports, log).run(numbers)
    assert not report.violations, report
    doors = {door for door, _ in report.counts}
    assert {"rest kserve", "rest generate_stream", "rest tensorflow", "rest paddle", "handlers", "rest admin"} <= doors
    assert {"openai chat", "openai completions", "openai responses", "openai others"} <= doors
    assert {"raw http", "raw http2", "grpc GRPCInferenceService/ModelInfer", "grpc PredictionService/Predict"} <= doors


def test_a_number_always_makes_the_same_message() -> None:
    """So that what was found can be sent again; every transport is used."""
    made = [make_message(number) for number in range(500)]
    assert made == [make_message(number) for number in range(500)]
    assert {message.transport for message in made} == set(Transport)


@pytest.mark.parametrize(
    ("status", "body", "is_fault"),
    [
        (200, b"", False),
        (404, b"", False),
        (503, b"why", False),
        (503, b"", True),
        (500, b"why", True),
        (504, b"", True),
    ],
)
def test_failures_over_http_need_a_reason(status: int, body: bytes, is_fault: bool) -> None:
    """Of the server's own only those that say why are allowed."""
    outcome = Outcome()
    outcome.add_http(status, body)
    assert (outcome.kinds, bool(outcome.faults)) == ([f"HTTP {status}"], is_fault)


@pytest.mark.parametrize(
    ("status", "message", "is_fault"),
    [
        ("0", "", False), ("3", "", False), ("2", "x", True), ("13", "x", True), ("", "", True),
        ("13", "request message is compressed, but grpc-encoding is 'identity'", False),
    ],
)  # fmt: skip
def test_failures_over_grpc(status: str, message: str, is_fault: bool) -> None:
    """Unknown and internal errors are the server's, but for what gRPC's own rules call so."""
    outcome = Outcome()
    outcome.add_grpc(status, message)
    assert bool(outcome.faults) is is_fault


def test_tracebacks_are_found_once_each_with_their_line() -> None:
    """Lines of a log without one are no fault, and numbers do not tell two apart."""
    first = "2026-01-01T00:00:00Z [error] failed\nTraceback (most recent call last):\n  File\nValueError: 1\n"
    quiet = "2026-01-01T00:00:01Z [info] all is well\n"
    again = first.replace("ValueError: 1", "ValueError: 22")
    assert tracebacks(first + quiet + again) == [again]
    assert tracebacks(quiet) == []
