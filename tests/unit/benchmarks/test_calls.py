"""The comparison of Python calls with their recorded baseline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import python_calls
from benchmarks.__main__ import main


@pytest.fixture
def baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Record a baseline of two cases with 100 calls each."""
    path = tmp_path / "calls.json"
    _measure(monkeypatch, {"a": 100.0, "b": 100.0})
    main(["calls", "--record", "--baseline", str(path)])
    return path


def _measure(monkeypatch: pytest.MonkeyPatch, calls: dict[str, float]) -> None:
    monkeypatch.setattr(python_calls, "CASES", calls)
    monkeypatch.setattr(python_calls, "_measure", calls.__getitem__)


def test_record_writes_the_calls_of_each_case(baseline: Path) -> None:
    """The file holds the numbers, and what they were measured with."""
    recorded = json.loads(baseline.read_text())
    assert recorded["calls"] == {"a": 100.0, "b": 100.0}
    assert recorded.keys() == {"machine", "python", "calls"}


@pytest.mark.parametrize(
    ("calls", "row", "code"),
    [
        ({"a": 105.0, "b": 20.0}, "| a | 105.0 | 100.0 | 1.05 |", 0),
        ({"a": 106.0, "b": 100.0}, "| a | 106.0 | 100.0 | **1.06** |", 1),
        ({"a": 100.0, "c": 9.0}, "| c | 9.0 | - | - |", "no baseline for c: record one with --record"),
    ],
)
def test_a_case_of_five_percent_more_calls_fails(
    baseline: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    calls: dict[str, float],
    row: str,
    code: int | str,
) -> None:
    """The table shows each case; a case without a baseline fails as well."""
    _measure(monkeypatch, calls)
    with pytest.raises(SystemExit) as ended:
        main(["calls", "--baseline", str(baseline)])
    assert ended.value.code == code
    assert row in capsys.readouterr().out.splitlines()


def test_a_file_that_is_no_baseline_is_refused(tmp_path: Path) -> None:
    """The message names the file."""
    path = tmp_path / "calls.json"
    path.write_text("[]")
    with pytest.raises(SystemExit, match=r"calls\.json is no baseline of calls"):
        main(["calls", "--baseline", str(path)])


def test_every_case_has_a_recorded_baseline() -> None:
    """The baseline in the repository is that of the current cases."""
    assert json.loads(python_calls.BASELINE.read_text())["calls"].keys() == python_calls.CASES.keys()
