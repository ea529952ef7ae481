from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import python_calls
from benchmarks.__main__ import main
from benchmarks.matrix.cells import QUICK, Cell
from benchmarks.matrix.load import LoadFigures
from benchmarks.matrix.measurement import Measurement
from benchmarks.matrix.runs import differences, read_run, save_run


@pytest.fixture
def baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "calls.json"
    _measure(monkeypatch, {"a": 100.0, "b": 100.0})
    main(["calls", "--record", "--baseline", str(path)])
    return path


def _measure(monkeypatch: pytest.MonkeyPatch, calls: dict[str, float]) -> None:
    monkeypatch.setattr(python_calls, "CASES", calls)
    monkeypatch.setattr(python_calls, "_measure", calls.__getitem__)


def test_recording_writes_the_calls_of_each_case(baseline: Path) -> None:
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
def test_a_case_with_over_five_percent_more_calls_fails(
    baseline: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    calls: dict[str, float],
    row: str,
    code: int | str,
) -> None:
    _measure(monkeypatch, calls)
    with pytest.raises(SystemExit) as ended:
        main(["calls", "--baseline", str(baseline)])
    assert ended.value.code == code
    assert row in capsys.readouterr().out.splitlines()


def test_every_case_has_a_recorded_baseline() -> None:
    assert json.loads(python_calls.BASELINE.read_text())["calls"].keys() == python_calls.CASES.keys()


CELL = str(Cell(QUICK.models[0], "gRPC", 8))


def _run(**figures: float) -> dict[str, dict[str, float]]:
    usual = {"ratio": 0.5, "spread": 0.02, "alone": 1000.0, "rate": 500.0, "cpu_us": 100.0, "p50_us": 10, "p99_us": 20}
    return {CELL: {**usual, **figures}}


def test_compare_reads_saved_runs_and_fails_on_a_loss_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path / "a.json", _run())
    save_run(tmp_path / "b.json", _run(ratio=0.3) | {"new": {}})

    with pytest.raises(SystemExit) as ended:
        main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])

    shown = capsys.readouterr().out
    assert read_run(tmp_path / "a.json") == _run()
    assert f"| {CELL} | ratio | -40% | **worse** |" in shown
    assert "only after: new\n" in shown
    assert ended.value.code == 1
    save_run(tmp_path / "a.json", _run())
    save_run(tmp_path / "b.json", _run(cpu_us=60))

    main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])

    assert f"| {CELL} | cpu_us | -40% | better |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [(json.dumps({"cells": {"other": _run()[CELL]}}), "no cell is in both runs"), ("[]", r"b\.json is no run")],
)
def test_compare_refuses_runs_that_cannot_be_compared(tmp_path: Path, content: str, message: str) -> None:
    save_run(tmp_path / "a.json", _run())
    (tmp_path / "b.json").write_text(content)
    with pytest.raises(SystemExit, match=message):
        main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])


@pytest.mark.parametrize(
    ("rounds", "ratio", "spread"),
    [
        pytest.param([(40, 100), (80, 200), (60, 150)], 0.4, 0.0, id="the machine became faster"),
        pytest.param([(50, 100), (51, 100), (49, 100), (5, 100), (52, 100)], 0.5, 0.04, id="one disturbed round"),
    ],
)
def test_the_ratio_of_a_cell_is_the_median_of_its_rounds(
    rounds: list[tuple[float, float]], ratio: float, spread: float
) -> None:
    summary = Measurement(tuple((LoadFigures(rate, 10, 1, 2), alone) for rate, alone in rounds)).summary()
    assert (summary["ratio"], summary["spread"]) == pytest.approx((ratio, spread))
    assert summary["alone"] == sorted(alone for _, alone in rounds)[len(rounds) // 2]


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        pytest.param({}, {"ratio": 0.4, "cpu_us": 108}, [("ratio", -0.2)], id="CPU that grew by 8 % is no change"),
        pytest.param({"spread": 0.33}, {"ratio": 0.4}, [], id="rounds of the ratio a third apart"),
        pytest.param({"cpu_spread": 0.05}, {"cpu_us": 120}, [("cpu_us", 0.2)], id="CPU that grew by a fifth"),
        pytest.param({"cpu_spread": 0.33}, {"cpu_us": 120}, [], id="rounds of CPU a third apart"),
        pytest.param({}, {"ratio": 1.0, "cpu_us": 150}, [("cpu_us", 0.5), ("ratio", 1.0)], id="losses come first"),
    ],
)
def test_changes_beyond_the_spread_of_rounds_are_listed(
    before: dict[str, float], after: dict[str, float], changes: list[tuple[str, float]]
) -> None:
    found = differences(_run(**before) | {"removed": {}}, _run(**after))
    assert [(cell, figure, round(change, 6)) for cell, figure, change in found] == [(CELL, *each) for each in changes]
