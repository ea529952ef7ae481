from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from ovmstrio.cli import tables
from ovmstrio.cli.exits import EXIT_CODES
from ovmstrio.cli.profile_tables import profile_rows, profile_tables
from ovmstrio.cli.reference import reference
from ovmstrio.cli.speedscope import speedscope_document
from ovmstrio.cli.tables import Output, print_table, show_data
from ovmstrio.cli.tensor_output import write_outputs
from ovmstrio.cli.top_figures import (
    FAMILIES,
    Look,
    ServableFigures,
    ServerFigures,
    figures_between,
    quantile,
    read_look,
)
from ovmstrio.cli.top_view import draw, in_order
from ovmstrio.cli.trace_figures import draw as draw_ops
from ovmstrio.client import ModelState
from ovmstrio.core.events import OK, CallEvent
from ovmstrio.core.metric_families import BUCKETS_US
from ovmstrio.serving.interfaces import KSERVE_GRPC, KSERVE_REST
from ovmstrio.telemetry.metrics import Metrics
from ovmstrio.text.text_metrics import TextMetrics
from tests.support.commands import all_commands, run_command
from tests.support.ops import op_figures
from tests.support.speedscope_format import check_speedscope

ROOT = Path(__file__).parents[3]
LONG = "a_model_with_quite_a_long_name_that_must_be_found"


def _table() -> Table:
    table = Table()
    for column in ("model", "state", "inputs"):
        table.add_column(column)
    table.add_row(LONG, "[green]READY[/]", "x FP32 [-1, 10]".replace("[", "\\[") + "\ny INT64")
    table.add_row("b", "READY", "")
    return table


def test_tables_in_pipes_are_lines_csv_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(_table())
    lines = capsys.readouterr().out.split("\n")
    width = len(LONG)
    assert lines == [
        f"{'model':{width}}  state  inputs",
        f"{LONG}  READY  x FP32 [-1, 10]; y INT64",
        f"{'b':{width}}  READY",
        "",
    ]
    show_data(_table(), [1], Output.CSV)
    assert list(csv.reader(io.StringIO(capsys.readouterr().out)))[1] == [LONG, "READY", "x FP32 [-1, 10]; y INT64"]
    for output, as_json in ((Output.JSON, False), (Output.TABLE, True)):
        show_data(_table(), [1], output, as_json=as_json)
        assert json.loads(capsys.readouterr().out) == [1]


def test_tables_on_terminals_are_blocks_or_coloured_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "stdout", lambda: Console(force_terminal=True, width=40))
    print_table(_table())
    shown = capsys.readouterr().out
    assert shown.startswith(f"model   {LONG}\nstate   READY\ninputs  x FP32 [-1, 10]; y INT64\n\nmodel   b\n")
    monkeypatch.setattr(tables, "stdout", lambda: Console(force_terminal=True, width=200))
    print_table(_table())
    shown = capsys.readouterr().out
    assert "[green]" not in shown
    assert re.search(rf"{LONG} .*\x1b\[32mREADY\x1b\[0m", shown)


# Commands that show data, with their required arguments.
_DATA = {
    "models": [],
    "sequence list": ["m"],
    "infer": ["--model", "m"],
    "stream": ["--model", "m", "--input", "x"],
    "sequence run": ["--model", "m", "--input", "x"],
    "health": [],
    "chat": [],
    "check": ["c"],
    "prepare": ["--list"],
    "top": [],
    "paddle trace": ["--once"],
    "demo": ["--once"],
    "graph check": ["g"],
    "pipeline check": ["c"],
    "custom-node check": ["n"],
    "keys list": [],
    "migrate triton": ["repository"],
    "profile": [],
}


@pytest.mark.parametrize("command", _DATA)
def test_commands_that_show_data_accept_the_same_formats(command: str) -> None:
    result = run_command(*command.split(), *_DATA[command], "--format", "xml")
    assert result.exit_code == 64
    assert all(form in result.output for form in ("--format", "table", "json", "csv")), result.output


def test_every_command_with_a_format_has_json_as_a_short_form() -> None:
    options = {path: {name for each in params for name in each.opts} for path, params in all_commands().items()}
    with_json = {path for path, names in options.items() if "--json" in names and not path.endswith(" show")}
    with_format = {path for path, names in options.items() if "--format" in names and not path.endswith(" show")}
    assert with_format == set(_DATA)
    assert with_format <= with_json


def test_checks_print_problems_as_csv(tmp_path: Path) -> None:
    (tmp_path / "graph.pbtxt").write_text('input_stream: "a"\nnode { calculator: "Nonsense" }\n')
    result = run_command("graph", "check", str(tmp_path), "--format", "csv")
    assert result.exit_code == 1
    rows = list(csv.DictReader(io.StringIO(result.output)))
    assert ("error", "2") in [(row["severity"], row["line"]) for row in rows]
    assert all(Path(row["file"]).name == "graph.pbtxt" for row in rows)


def test_outputs_as_csv_have_one_row_per_value(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = {"y": np.arange(20).reshape(2, 10), "z": np.array([b"a,b"], object), "w": np.array(np.nan)}
    write_outputs(outputs, "csv")
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows[0] == ["output", "index", "value"]
    assert rows[-4:] == [["y", "1 8", "18"], ["y", "1 9", "19"], ["z", "0", "a,b"], ["w", "", "NaN"]]
    assert len(rows) == 1 + 20 + 1 + 1


def test_documented_exit_codes_and_reference_are_up_to_date() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", (ROOT / "docs" / "exit_codes.md").read_text(), re.MULTILINE)
    assert {int(code): meaning for code, meaning in rows} == EXIT_CODES
    assert reference() == PAGE.read_text(encoding="utf-8")


def _call(metrics: Metrics, name: str, *, kind: str = "model", method: str = "ModelInfer", code: str = OK) -> None:
    event = CallEvent(name, "1", kind, KSERVE_REST if code == OK else KSERVE_GRPC, method)
    metrics.call_started(event)
    event.seconds, event.code = 0.001, code
    metrics.call_finished(event)


def _look(metrics: Metrics, at: float, *states: tuple[str, str, str]) -> Look:
    listed = [ModelState(*state, reason="") for state in states]
    return read_look(metrics.render(FAMILIES).decode(), listed, at)


def test_rates_and_percentiles_cover_the_calls_between_two_snapshots() -> None:
    metrics = Metrics()
    states = ("m", "1", "READY"), ("m", "2", "LOADING"), ("idle", "1", "READY")
    for _ in range(5):
        _call(metrics, "m")
    before = _look(metrics, 10.0, *states)
    for _ in range(6):
        _call(metrics, "m")
    for code in ("ModelFailure", "ModelFailure"):
        _call(metrics, "m", code=code)
    _call(metrics, "m", method="ModelReady", code="NotFound")
    metrics.call_started(CallEvent("m", "1", "model", KSERVE_GRPC, "ModelInfer"))
    metrics.set_memory("m", "1", "weights", 30)
    metrics.set_memory("m", "1", "outputs", 12)
    metrics.set_memory("idle", "1", "weights", 5)
    metrics.set_memory("idle", "1", "resident", 700)
    metrics.child("ovmstrio_queued_requests", "m").set(3)
    metrics.child("ovmstrio_connections", "gRPC").set(2)
    metrics.child("ovmstrio_ready").set(1)
    figures = figures_between(before, _look(metrics, 12.0, *states))
    (first, second, third) = figures.servables
    assert (first.name, first.version, first.state) == ("m", "1", "READY")
    assert (first.requests_per_second, first.errors_per_second) == (4, 1)
    assert (first.in_flight, first.queued, first.memory_bytes) == (1, 3, 42)
    assert 0.6 < (first.p50_ms or 0) < (first.p99_ms or 0) <= 1.2
    assert (second.name, second.p50_ms, second.memory_bytes) == ("idle", None, 700)
    assert (third.version, third.state, third.requests_per_second) == ("2", "LOADING", 0)
    assert (figures.ready, figures.connections) == (True, {"gRPC": 2})
    assert (figures.resident_bytes or 0) > 0
    assert figures.cpu is not None


def test_calls_of_graphs_are_counted_without_a_version() -> None:
    metrics = Metrics()
    states = (("g", "1", "READY"),)
    graph = metrics.graph("g")
    before = _look(metrics, 0.0, *states)
    graph.started()
    graph.started()
    graph.finished("ModelInfer", 0.004, ok=True)
    figures = figures_between(before, _look(metrics, 1.0, *states))
    assert (figures.servables[0].requests_per_second, figures.servables[0].in_flight) == (1, 1)


def test_rates_after_a_restart_count_from_zero() -> None:
    states = (("m", "1", "READY"),)
    old, new = Metrics(), Metrics()
    for _ in range(9):
        _call(old, "m", code="ModelFailure")
    for _ in range(2):
        _call(new, "m", code="ModelFailure")
    before, now = _look(old, 0.0, *states), _look(new, 1.0, *states)
    before.cpu_seconds, now.cpu_seconds = 50.0, 0.5
    figures = figures_between(before, now)
    assert (figures.servables[0].requests_per_second, figures.servables[0].errors_per_second) == (2, 2)
    assert figures.cpu == 0.5
    assert quantile({}, 0.5) is None
    assert quantile({10.0: 0, float("inf"): 0}, 0.5) is None


@given(st.lists(st.floats(1, 1e9), min_size=1, max_size=50), st.sampled_from([0.5, 0.99]))
def test_a_quantile_is_in_the_bucket_of_its_call(times: list[float], part: float) -> None:
    counted = {bound: sum(each <= bound for each in times) for bound in (*BUCKETS_US, float("inf"))}
    found = (quantile(counted, part) or 0) * 1000
    wanted = sorted(times)[max(0, -int(-part * len(times) // 1) - 1)]
    high = next(bound for bound in BUCKETS_US if wanted <= bound)
    low = max((bound for bound in BUCKETS_US if bound < wanted), default=0.0)
    assert low * 0.999 <= found <= high * 1.001


def test_tokens_sequences_and_worker_memory_are_shown() -> None:
    metrics, text = Metrics(), TextMetrics("t")
    states = ("t", "1", "READY"), ("s", "2", "READY")
    metrics.register_gauge("ovmstrio_sequences", lambda: {("s", "2"): 3})
    metrics.register_gauge("ovmstrio_worker_memory_bytes", lambda: {("t",): 4096})
    with metrics.collecting((text,), ""):
        text.generation_tokens.inc(10)
        before = _look(metrics, 10.0, *states)
        text.generation_tokens.inc(50)
        text.waiting.set(2)
        text.cache_usage.set(0.5)
        found = {each.name: each for each in figures_between(before, _look(metrics, 12.0, *states)).servables}
    assert (found["t"].tokens_per_second, found["t"].cache_usage, found["t"].queued) == (25, 0.5, 2)
    assert (found["t"].memory_bytes, found["t"].sequences) == (4096, None)
    assert (found["s"].sequences, found["s"].tokens_per_second, found["s"].memory_bytes) == (3, None, None)
    titles, _, *rows = _drawn(120, 20, ServerFigures(True, None, None, {}, [found["s"], found["t"]]))[1:]
    assert titles.split()[-4:] == ["seq", "tok/s", "KV", "memory"]
    assert [row.split()[-1] for row in rows[:2]] == ["3", "KiB"]


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("req/s", ["b", "a", "c"]),
        ("servable", ["a", "b", "c"]),
        ("state", ["c", "a", "b"]),
        ("p99", ["c", "a", "b"]),
        ("memory", ["a", "c", "b"]),
    ],
)
def test_rows_are_sorted_by_any_column(by: str, expected: list[str]) -> None:
    rows = [
        ServableFigures("a", "1", "READY", 2, 0, 0, 0, None, 2.0, 10),
        ServableFigures("b", "1", "READY", 3, 0, 0, 0, None, None, None),
        ServableFigures("c", "1", "LOADING", 1, 0, 0, 0, None, 5.0, 5),
    ]
    shown = ServerFigures(True, None, None, {}, rows)
    assert [each.name for each in in_order(shown, by).servables] == expected
    if by != "state":
        assert [each.name for each in in_order(shown, by, is_reversed=True).servables] == expected[::-1]


def test_the_sorted_column_is_marked_on_a_narrow_terminal() -> None:
    titles = next(line for line in _drawn(40, 20, _figures("a", "b"), by="memory") if line.startswith("servable"))
    assert "memory\N{BLACK DOWN-POINTING SMALL TRIANGLE}" in titles


def _figures(*names: str) -> ServerFigures:
    each = [ServableFigures(name, "1", "READY", 1234.4, 0.5, 7, 0, 0.25, 1500.0, 5 * 2**20) for name in names]
    return ServerFigures(True, 300 * 2**20, 1.25, {"gRPC": 3, "REST": 1}, each)


def _drawn(width: int, height: int, shown: ServerFigures | None, trouble: str = "", **order: str) -> list[str]:
    console = Console(width=width, height=height, color_system=None, force_terminal=True)
    with console.capture() as captured:
        console.print(draw(shown, "127.0.0.1:8000", trouble, width, height, **order))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_wide_terminals_show_all_columns_and_narrow_ones_the_most_important() -> None:
    head, titles, _, row, foot = _drawn(110, 20, _figures("resnet"))
    assert head == ("127.0.0.1:8000  ready  1234 req/s  CPU 1.25  memory 300 MiB  connections 1 REST, 3 gRPC")
    assert titles.split() == ["servable", "version", "state", "req/s", "err/s", "busy", "queue", "p50", "p99", "memory"]
    assert row.split() == ["resnet", "1", "READY", "1234", "0.5", "7", "0", "0.25", "ms", "1.5", "s", "5.0", "MiB"]
    assert foot == "q quits"
    lines = _drawn(40, 20, _figures("a_model_with_quite_a_long_name", "b"), "no server answers; trying again")
    assert max(map(len, lines)) <= 40
    (titles,) = (line for line in lines if line.startswith("servable"))
    assert titles.split()[:3] == ["servable", "req/s", "err/s"]
    assert "no server answers; trying again" in lines
    (row,) = (line for line in lines if line.startswith("a_model"))
    assert row.split()[0].endswith("\N{HORIZONTAL ELLIPSIS}")
    assert row.split()[1:3] == ["1234", "0.5"]
    assert " 1.5 s" in row


@given(st.integers(24, 200), st.integers(12, 40), st.lists(st.text(max_size=30), max_size=60))
def test_the_view_fits_any_terminal(width: int, height: int, names: list[str]) -> None:
    for shown in (_figures(*names), None):
        lines = _drawn(width, height, shown, "no server answers")
        assert len(lines) <= height
        assert max(map(cell_len, lines)) <= width
    lines = _drawn(width, height, _figures(*names))
    below = next(index for index, line in enumerate(lines) if line.startswith("\N{BOX DRAWINGS LIGHT HORIZONTAL}"))
    left_out = len(names) - len(lines[below + 1 : -1])
    assert lines[-1] == (f"{left_out} more; q quits" if left_out else "q quits")


def _drawn_ops(width: int = 160) -> str:
    console = Console(width=width, record=True, file=None, force_terminal=False)
    with console.capture() as captured:
        console.print(draw_ops(op_figures(), console))
    return captured.get()


def test_the_view_of_ops_has_rates_percentiles_batch_sizes_and_queues() -> None:
    text = _drawn_ops()
    assert "4 answered · 1 failed · 0 left · p50 500 p90 500 p99 500 ms" in text
    det = next(line for line in text.splitlines() if line.startswith("det"))
    assert "12.00" not in det
    assert " 12 / 16 / 16 " in det
    assert "2.5 (max 4)" in det
    assert det.split()[-1] == "1"
    assert "████████░░ 3/4" in text
    assert "\x1b[2J" not in text
    waiting = next(line for line in text.splitlines() if line.startswith("chl1"))
    assert waiting.split() == ["chl1", "det", "rec", "7"]


@pytest.mark.parametrize(("width", "heading", "midp"), [(80, "p50)", "12"), (120, "p50 / p99)", "12 / 16")])
def test_the_view_of_ops_on_narrow_terminals_has_fewer_percentiles(width: int, heading: str, midp: str) -> None:
    lines = _drawn_ops(width).splitlines()
    assert any(line.startswith("Op") and heading in line for line in lines)
    assert f" {midp}  " in next(line for line in lines if line.startswith("det"))
    assert sum("rec" in line for line in lines) == 2
    assert not any("…" in line for line in lines)


def test_a_very_narrow_terminal_has_a_block_for_each_op_and_channel() -> None:
    lines = [line.rstrip() for line in _drawn_ops(40).splitlines()]
    assert max(map(len, lines)) <= 40
    assert [line.split() for line in lines if line.startswith(("Channel", "from", "to"))][:3] == [
        ["Channel", "chl0"],
        ["from", "@DAGExecutor"],
        ["to", "det"],
    ]
    assert ["midp", "12"] in [line.split() for line in lines]


REPORT: dict[str, Any] = {
    "seconds": 2.0,
    "cpu_seconds": 1.0,
    "native_cpu_seconds": 0.25,
    "frames": [{"name": "outer", "file": "/a/b.py", "line": 3}, {"name": "inner", "file": "/a/c.py", "line": 7}],
    "threads": [
        {
            "name": "event loop",
            "samples": 10,
            "waiting": 4,
            "cpu_seconds": 0.75,
            "stacks": [{"frames": [0, 1], "samples": 5}, {"frames": [0], "samples": 1}],
        }
    ],
    "processes": [{"service": "words", "pid": 77, "cpu_seconds": 1.5, "problem": "it was starting"}],
    "models": [
        {
            "name": "m",
            "version": "1",
            "calls": 3,
            "runs": 200,
            "seconds": 4e-6,
            "layers": [
                {"name": "a", "type": "MatMul", "runs_as": "brgemm", "seconds": 3e-6},
                {"name": "b", "type": "Relu", "runs_as": "jit", "seconds": 1e-6},
            ],
        },
        {"name": "n", "version": "", "calls": 0, "problem": "it is no model"},
    ],
}


def test_the_speedscope_document_has_the_time_of_each_stack_and_its_schema() -> None:
    made = speedscope_document(REPORT)
    names = [frame["name"] for frame in made["shared"]["frames"]]
    loop, layers = made["profiles"]
    stacks = [[names[number] for number in stack] for stack in loop["samples"]]
    assert stacks == [["outer", "inner"], ["outer"], ["idle"]]
    assert loop["weights"] == pytest.approx([1.0, 0.2, 0.8])
    assert (loop["unit"], loop["endValue"]) == ("seconds", pytest.approx(2.0))
    assert [names[number] for (number,) in layers["samples"]] == ["a (MatMul, brgemm)", "b (Relu, jit)"]
    assert (layers["unit"], layers["weights"]) == ("microseconds", pytest.approx([3.0, 1.0]))
    assert made["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    check_speedscope(speedscope_document(REPORT))
    check_speedscope(speedscope_document({**REPORT, "threads": [], "models": []}))


def _of_workers() -> dict[str, Any]:
    workers = [{"worker": row, "seconds": 2.0, "cpu_seconds": 0.5, "native_cpu_seconds": 0.125} for row in (0, 1)]
    threads = [{**each, "worker": row} for row in (0, 1) for each in REPORT["threads"]]
    return {**REPORT, "threads": threads, "processes": [], "workers": workers, "silent": [2]}


def test_each_worker_has_its_own_profile() -> None:
    report = _of_workers()
    titles = [title for title, _ in profile_tables(report)]
    assert [title for title in titles if "worker" in title and "samples" in title] == [
        "[bold]worker 0: event loop[/]: 10 samples",
        "[bold]worker 1: event loop[/]: 10 samples",
    ]
    assert "Worker 2 did not answer in time and is not included" in titles
    assert {row[0] for row in profile_rows(report)} == {"worker 0: event loop", "worker 1: event loop", "m"}
    names = [profile["name"] for profile in speedscope_document(report)["profiles"]]
    assert names == ["worker 0: event loop", "worker 1: event loop", "layers of m"]
    _, table = next(profile_tables(report))
    assert table is not None
    assert list(table.columns[0].cells) == [
        "worker 0: event loop",
        "worker 1: event loop",
        "worker 0: OpenVINO and other native threads",
        "worker 1: OpenVINO and other native threads",
    ]


def test_unsampled_processes_are_listed_with_a_py_spy_command() -> None:
    threads, *others = profile_tables(REPORT)
    table = threads[1]
    assert table is not None
    (names, took, waiting) = ([*column.cells] for column in table.columns)
    assert (names[-1], took[-1], waiting[-1]) == ("process 77 of words", "1.50 s", "not sampled")
    assert any("py-spy record --gil --pid 77" in title for title, _ in others)
    assert "not sampled" not in str([title for title, _ in profile_tables({**REPORT, "processes": []})])


def test_profile_rows_have_own_and_total_shares() -> None:
    assert list(profile_rows(REPORT)) == [
        ("event loop", "outer", "/a/b.py:3", 10.0, 60.0, ""),
        ("event loop", "inner", "/a/c.py:7", 50.0, 50.0, ""),
        ("m", "a", "MatMul brgemm", 75.0, "", 3.0),
        ("m", "b", "Relu jit", 25.0, "", 1.0),
    ]


PAGE = ROOT / "docs" / "cli.md"


def test_the_reference_has_no_entities_or_tags() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not re.findall(r"&#?\w+;", text)
    outside_of_code = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    assert not re.findall(r"(?<!\\)</?[a-z]", outside_of_code)


def test_the_reference_has_every_option_of_every_command() -> None:
    text = PAGE.read_text(encoding="utf-8")
    sections = dict(re.findall(r"^### `ovms (.*?)`\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL))
    for path, params in all_commands().items():
        names = {name for each in params if each.name != "help" for name in each.opts if name.startswith("--")}
        missing = [name for name in names if not re.search(rf"^\* `.*{name}\b", sections[path], re.MULTILINE)]
        assert missing == [], path
