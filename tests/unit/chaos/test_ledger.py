"""The ledger of the chaos run: which answers are violations."""

from __future__ import annotations

import pytest

from tests.chaos.ledger import Ledger, Said


def test_a_window_excuses_only_what_it_allows() -> None:
    ledger = Ledger()
    before = ledger.began
    with ledger.window("kill", Said.LOST, whom=frozenset({"a"})):
        ledger.note("a", Said.LOST, before)
        ledger.note("a", Said.WRONG, before, "7")
        ledger.note("b", Said.LOST, before, "gone")
        ledger.note("b", Said.RIGHT, before)
    wrong, lost = ledger.violations()
    assert wrong.endswith("a: wrong answers: 7 (meanwhile: kill)")
    assert lost.endswith("b: without an answer: gone (meanwhile: kill)")


def test_calls_after_a_window_are_not_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("tests.chaos.ledger.time.monotonic", lambda: now)
    ledger = Ledger(began=now)
    with ledger.window("restart", Said.UNREACHED, after_seconds=3):
        now = 110.0
    now = 112.5
    ledger.note("a", Said.UNREACHED, now)
    assert ledger.violations() == []
    now = 113.5
    ledger.note("a", Said.UNREACHED, now, "refused")
    assert ledger.violations() == ["13.50 to 13.50 s: a: not accepted: refused (meanwhile: nothing)"]


def test_equal_violations_are_counted_in_one_text() -> None:
    ledger = Ledger()
    for _ in range(30):
        ledger.note("a", Said.SILENT, ledger.began, "timed out")
    (violation,) = ledger.violations()
    assert violation.startswith("30 times, first ")
