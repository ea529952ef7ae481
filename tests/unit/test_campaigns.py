from __future__ import annotations

import pytest

from tests.chaos.ledger import CallOutcome, Ledger
from tests.fuzz.campaign import make_message, tracebacks
from tests.fuzz.messages import Outcome, Transport


def test_a_number_always_makes_the_same_message() -> None:
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
def test_http_failures_need_a_reason(status: int, body: bytes, is_fault: bool) -> None:
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
def test_unknown_and_internal_grpc_errors_are_faults(status: str, message: str, is_fault: bool) -> None:
    outcome = Outcome()
    outcome.add_grpc(status, message)
    assert bool(outcome.faults) is is_fault


def test_equal_tracebacks_are_found_once() -> None:
    first = "2026-01-01T00:00:00Z [error] failed\nTraceback (most recent call last):\n  File\nValueError: 1\n"
    quiet = "2026-01-01T00:00:01Z [info] all is well\n"
    again = first.replace("ValueError: 1", "ValueError: 22")
    assert tracebacks(first + quiet + again) == [again]
    assert tracebacks(quiet) == []


def test_a_window_excuses_only_what_it_allows() -> None:
    ledger = Ledger()
    before = ledger.began
    with ledger.window("kill", CallOutcome.LOST, clients=frozenset({"a"})):
        ledger.note("a", CallOutcome.LOST, before)
        ledger.note("a", CallOutcome.WRONG, before, "7")
        ledger.note("b", CallOutcome.LOST, before, "gone")
        ledger.note("b", CallOutcome.RIGHT, before)
    wrong, lost = ledger.violations()
    assert wrong.endswith("a: wrong answers: 7 (meanwhile: kill)")
    assert lost.endswith("b: connection lost: gone (meanwhile: kill)")


def test_calls_after_a_window_are_not_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("tests.chaos.ledger.time.monotonic", lambda: now)
    ledger = Ledger(began=now)
    with ledger.window("restart", CallOutcome.UNREACHED, after_seconds=3):
        now = 110.0
    now = 112.5
    ledger.note("a", CallOutcome.UNREACHED, now)
    assert ledger.violations() == []
    now = 113.5
    ledger.note("a", CallOutcome.UNREACHED, now, "refused")
    assert ledger.violations() == ["13.50 to 13.50 s: a: connection refused: refused (meanwhile: nothing)"]


def test_equal_violations_are_counted_in_one_text() -> None:
    ledger = Ledger()
    for _ in range(30):
        ledger.note("a", CallOutcome.SILENT, ledger.began, "timed out")
    (violation,) = ledger.violations()
    assert violation.startswith("30 times, first ")
