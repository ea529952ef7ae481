"""Messages and outcomes of the fuzzing campaign."""

from __future__ import annotations

import pytest

from tests.fuzz.campaign import tracebacks
from tests.fuzz.making import make_message
from tests.fuzz.messages import Transport
from tests.fuzz.outcomes import Outcome


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
