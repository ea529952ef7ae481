"""Runs of the matrix: what two of them differ in, how they are kept and drawn, and what a record leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from benchmarks import report
from benchmarks.__main__ import main
from benchmarks.matrix.cells import BRIEF, FULL, QUICK, Cell
from benchmarks.matrix.chart import chart
from benchmarks.matrix.load import LoadFigures
from benchmarks.matrix.measuring import Measured
from benchmarks.matrix.runs import differences, read_run, render_run, save_run
from benchmarks.matrix.summary import render_summary

CELL = str(Cell(QUICK.models[0], "gRPC", 8))


def _run(**figures: float) -> dict[str, dict[str, float]]:
    usual = {"ratio": 0.5, "spread": 0.02, "alone": 1000.0, "rate": 500.0, "cpu_us": 100.0, "p50_us": 10, "p99_us": 20}
    return {CELL: {**usual, **figures}}


def test_a_cell_is_told_that_lost_more_than_a_tenth() -> None:
    """A ratio that fell by a fifth is told, and CPU that grew by 8 percent is not."""
    ((cell, figure, change),) = differences(_run(), _run(ratio=0.4, cpu_us=108))

    assert (cell, figure) == (CELL, "ratio")
    assert change == pytest.approx(-0.2)


def test_what_a_cell_differs_by_itself_is_no_difference() -> None:
    """A ratio whose rounds were a third apart says nothing with a change of a fifth."""
    assert differences(_run(spread=0.33), _run(ratio=0.4)) == []


def test_processor_time_whose_rounds_differ_as_much_is_no_difference() -> None:
    """CPU a call that grew by a fifth is told, unless its own rounds were a third apart."""
    assert [figure for _, figure, _ in differences(_run(cpu_spread=0.05), _run(cpu_us=120))] == ["cpu_us"]
    assert differences(_run(cpu_spread=0.33), _run(cpu_us=120)) == []


def test_one_round_that_the_machine_spoiled_does_not_hide_a_change() -> None:
    """Of five rounds the two that are farthest off say nothing of how far the others lie apart."""
    rounds = tuple((LoadFigures(rate, 10, 1, 2), 100.0) for rate in (50.0, 51.0, 49.0, 5.0, 52.0))

    summary = Measured(rounds).summary()

    assert summary["ratio"] == pytest.approx(0.5)
    assert summary["spread"] == pytest.approx(0.04)


def test_the_brief_part_has_every_size_and_shape_once() -> None:
    """Its cells are those of the matrix, so that the two are compared."""
    names = {str(Cell(case, door, count)) for case in BRIEF.models for door in BRIEF.doors for count in (8,)}
    whole = {str(Cell(case, door, count)) for case in FULL.models for door in FULL.doors for count in (8,)}

    assert len(names) == 5 * 2
    assert names < whole


def test_what_became_worse_comes_first() -> None:
    """More CPU is worse, a higher ratio is better, and only cells of both runs are compared."""
    found = differences(_run() | {"gone": {}}, _run(ratio=1.0, cpu_us=150))

    assert [figure for _, figure, _ in found] == ["cpu_us", "ratio"]


def test_a_saved_run_is_read_and_compared_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``compare A B`` reads what a run has saved, and shows the cell with its change."""
    save_run(tmp_path / "a.json", _run())
    save_run(tmp_path / "b.json", _run(ratio=0.3) | {"new": {}})

    with pytest.raises(SystemExit) as ended:
        main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])

    shown = capsys.readouterr().out
    assert read_run(tmp_path / "a.json") == _run()
    assert f"| {CELL} | ratio | -40% | **worse** |" in shown
    assert "only after: new\n" in shown
    assert ended.value.code == 1


def test_a_change_that_costs_nothing_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script may go on where cells became better only."""
    save_run(tmp_path / "a.json", _run())
    save_run(tmp_path / "b.json", _run(cpu_us=60))

    main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])

    assert f"| {CELL} | cpu_us | -40% | better |" in capsys.readouterr().out


def test_runs_that_have_no_cell_in_common_do_not_pass(tmp_path: Path) -> None:
    """A script that compares what cannot be compared would never find a loss."""
    save_run(tmp_path / "a.json", _run())
    save_run(tmp_path / "b.json", {"other": _run()[CELL]})

    with pytest.raises(SystemExit, match="no cell is in both runs"):
        main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])


def test_a_file_that_is_no_run_is_refused(tmp_path: Path) -> None:
    """Something else in a run's place ends the command with the name of the file."""
    (tmp_path / "a.json").write_text("[]")

    with pytest.raises(SystemExit, match=r"a\.json is no run"):
        main(["compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")])


def test_medians_of_rounds_are_ratios_to_what_ran_beside_them() -> None:
    """Each round is held against its own neighbour, so that a machine that became faster changes nothing."""
    rounds = tuple((LoadFigures(speed * 40, 10, 1, 2), speed * 100) for speed in (1.0, 2.0, 1.5))

    summary = Measured(rounds).summary()

    assert (summary["ratio"], summary["spread"], summary["alone"]) == pytest.approx((0.4, 0.0, 150))


def test_the_matrix_has_every_combination_once() -> None:
    """Five sizes, two shapes, three hints, three concurrencies and four doors, alone and beside others."""
    names = [
        str(Cell(case, door, count)) for case in FULL.models for door in FULL.doors for count in FULL.concurrencies
    ]

    assert len(names) == len(set(names)) == 5 * 2 * 3 * 3 * 4 * 2


def test_a_chart_has_a_tile_for_each_cell_of_its_run() -> None:
    """The picture is well-formed, and shows the ratios of the cells that there are."""
    picture = ET.fromstring(chart(_run(ratio=0.87)))

    texts = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("0.87") == 1
    assert "LATENCY, alone" in texts
    assert "0.87" in render_run(_run(ratio=0.87))


def test_a_record_changes_its_own_section_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands around a section stays, and a section that is not there is an error that names it."""
    file = tmp_path / "RESULTS.md"
    begin, end = "<!-- matrix: written by a program -->\n", "<!-- end of matrix -->\n"
    file.write_text(f"by hand\n{begin}old\n{end}| too | by hand |\n")
    monkeypatch.setattr(report, "RESULTS", file)

    report.write_section("matrix", "new")

    assert file.read_text() == f"by hand\n{begin}\nnew\n\n{end}| too | by hand |\n"
    with pytest.raises(ValueError, match="no section 'peers'"):
        report.write_section("peers", "new")


def test_results_have_the_sections_that_programs_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file in the repository can be written by each command that records."""
    written: list[Any] = []
    monkeypatch.setattr(Path, "write_text", lambda _, text: written.append(text))

    for section in ("matrix", "peers", "rows"):
        report.write_section(section, "new")

    assert len(written) == 3


def test_the_summary_has_medians_of_kinds_of_models_and_of_pairs() -> None:
    """By doors and callers; of what was not measured nothing is said."""
    ratios = {
        "1 ms, fixed, LATENCY, alone, gRPC, 8": 0.4,
        "1 ms, dynamic, LATENCY, alone, gRPC, 8": 0.6,
        "1 ms, dynamic, LATENCY, beside four, gRPC, 8": 0.3,
        "1 ms, dynamic, LATENCY, alone, REST JSON, 32": 0.2,
    }
    rows = render_summary({name: {"ratio": ratio} for name, ratio in ratios.items()}).splitlines()

    assert [row for row in rows if row.startswith(("| 1 ms", "| an open", "| beside"))] == [
        "| 1 ms, LATENCY | - / 0.40 / - | - / - / 0.20 | - / - / - | - / - / - |",
        "| an open batch against a fixed one | - | - | 1.50 | - | - |",
        "| beside four other models against alone | - | - | 0.50 | - | - |",
    ]
    assert len(rows) == 8
