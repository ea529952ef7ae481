"""Figures of ``ovms top``, and their layout on terminals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from ovms_cli.top_figures import FAMILIES, Look, ServableFigures, ServerFigures, figures_between, quantile, read_look
from ovms_cli.top_view import draw, in_order
from ovmstrio.api.doors import KSERVE_GRPC, KSERVE_REST
from ovmstrio.client import ModelState
from ovmstrio.core.events import OK, CallEvent
from ovmstrio.core.metric_families import BUCKETS_US
from ovmstrio.observability.metrics import Metrics
from ovmstrio.runtimes.generation.text_metrics import TextMetrics


def call(metrics: Metrics, name: str, *, kind: str = "model", method: str = "ModelInfer", code: str = OK) -> None:
    """Have one call begin and end, after a millisecond as far as the metrics know."""
    event = CallEvent(name, "1", kind, KSERVE_REST if code == OK else KSERVE_GRPC, method)
    metrics.call_started(event)
    event.seconds, event.code = 0.001, code
    metrics.call_finished(event)


def look(metrics: Metrics, at: float, *states: tuple[str, str, str]) -> Look:
    """Look at metrics as the command does."""
    listed = [ModelState(*state, reason="") for state in states]
    return read_look(metrics.render(FAMILIES).decode(), listed, at)


def test_rates_and_times_are_of_what_happened_between_two_looks() -> None:
    """Calls over all protocols count, failures among them, and questions do not."""
    metrics = Metrics()
    states = ("m", "1", "READY"), ("m", "2", "LOADING"), ("idle", "1", "READY")
    for _ in range(5):
        call(metrics, "m")
    before = look(metrics, 10.0, *states)
    for _ in range(6):
        call(metrics, "m")
    for code in ("ModelFailure", "ModelFailure"):
        call(metrics, "m", code=code)
    call(metrics, "m", method="ModelReady", code="NotFound")
    metrics.call_started(CallEvent("m", "1", "model", KSERVE_GRPC, "ModelInfer"))
    metrics.set_memory("m", "1", "weights", 30)
    metrics.set_memory("m", "1", "outputs", 12)
    metrics.set_memory("idle", "1", "weights", 5)
    metrics.set_memory("idle", "1", "resident", 700)
    metrics.child("ovmstrio_queued_requests", "m").set(3)
    metrics.child("ovmstrio_connections", "gRPC").set(2)
    metrics.child("ovmstrio_ready").set(1)
    figures = figures_between(before, look(metrics, 12.0, *states))
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


def test_graphs_are_counted_though_their_metrics_have_no_version() -> None:
    """Their instances are under way, and their runs have times."""
    metrics = Metrics()
    states = (("g", "1", "READY"),)
    graph = metrics.graph("g")
    before = look(metrics, 0.0, *states)
    graph.started()
    graph.started()
    graph.finished("ModelInfer", 0.004, ok=True)
    figures = figures_between(before, look(metrics, 1.0, *states))
    assert (figures.servables[0].requests_per_second, figures.servables[0].in_flight) == (1, 1)


def test_a_server_that_was_started_again_began_at_zero() -> None:
    """No rate is below zero."""
    states = (("m", "1", "READY"),)
    old, new = Metrics(), Metrics()
    for _ in range(9):
        call(old, "m", code="ModelFailure")
    for _ in range(2):
        call(new, "m", code="ModelFailure")
    before, now = look(old, 0.0, *states), look(new, 1.0, *states)
    before.cpu_seconds, now.cpu_seconds = 50.0, 0.5
    figures = figures_between(before, now)
    assert (figures.servables[0].requests_per_second, figures.servables[0].errors_per_second) == (2, 2)
    assert figures.cpu == 0.5


@given(st.lists(st.floats(1, 1e9), min_size=1, max_size=50), st.sampled_from([0.5, 0.99]))
def test_a_quantile_is_in_the_bucket_of_the_call_that_it_is(times: list[float], part: float) -> None:
    """However the calls are spread."""
    counted = {bound: sum(each <= bound for each in times) for bound in (*BUCKETS_US, float("inf"))}
    found = (quantile(counted, part) or 0) * 1000
    wanted = sorted(times)[max(0, -int(-part * len(times) // 1) - 1)]
    high = next(bound for bound in BUCKETS_US if wanted <= bound)
    low = max((bound for bound in BUCKETS_US if bound < wanted), default=0.0)
    assert low * 0.999 <= found <= high * 1.001


def test_texts_sequences_and_processes_are_in_the_figures() -> None:
    """Each where there is one; what waits for a batch of texts waits as what waits for a place does."""
    metrics, text = Metrics(), TextMetrics("t")
    states = ("t", "1", "READY"), ("s", "2", "READY")
    metrics.show("ovmstrio_sequences", lambda: {("s", "2"): 3})
    metrics.show("ovmstrio_worker_memory_bytes", lambda: {("t",): 4096})
    with metrics.collecting((text,), ""):
        text.generation_tokens.inc(10)
        before = look(metrics, 10.0, *states)
        text.generation_tokens.inc(50)
        text.waiting.set(2)
        text.cache_usage.set(0.5)
        found = {each.name: each for each in figures_between(before, look(metrics, 12.0, *states)).servables}
    assert (found["t"].tokens_per_second, found["t"].cache_usage, found["t"].queued) == (25, 0.5, 2)
    assert (found["t"].memory_bytes, found["t"].sequences) == (4096, None)
    assert (found["s"].sequences, found["s"].tokens_per_second, found["s"].memory_bytes) == (3, None, None)
    titles, _, *rows = drawn(120, 20, ServerFigures(True, None, None, {}, [found["s"], found["t"]]))[1:]
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
    """Texts from their beginning, numbers from the largest, and what nobody can tell last; or the other way round."""
    rows = [
        ServableFigures("a", "1", "READY", 2, 0, 0, 0, None, 2.0, 10),
        ServableFigures("b", "1", "READY", 3, 0, 0, 0, None, None, None),
        ServableFigures("c", "1", "LOADING", 1, 0, 0, 0, None, 5.0, 5),
    ]
    shown = ServerFigures(True, None, None, {}, rows)
    assert [each.name for each in in_order(shown, by).servables] == expected
    if by != "state":
        assert [each.name for each in in_order(shown, by, is_reversed=True).servables] == expected[::-1]


def test_the_column_of_the_order_is_marked_and_stays() -> None:
    """However narrow the terminal is."""
    console = Console(width=40, height=20, color_system=None, force_terminal=True)
    with console.capture() as captured:
        console.print(draw(figures("a", "b"), "x", "", 40, 20, by="memory"))
    titles = next(line for line in captured.get().splitlines() if line.startswith("servable"))
    assert "memory\N{BLACK DOWN-POINTING SMALL TRIANGLE}" in titles


def test_without_calls_there_are_no_times() -> None:
    """Neither without buckets nor with empty ones."""
    assert quantile({}, 0.5) is None
    assert quantile({10.0: 0, float("inf"): 0}, 0.5) is None


def figures(*names: str) -> ServerFigures:
    """Make a server of busy models."""
    each = [ServableFigures(name, "1", "READY", 1234.4, 0.5, 7, 0, 0.25, 1500.0, 5 * 2**20) for name in names]
    return ServerFigures(True, 300 * 2**20, 1.25, {"gRPC": 3, "REST": 1}, each)


def drawn(width: int, height: int, shown: ServerFigures | None, trouble: str = "") -> list[str]:
    """Draw on a terminal of that size; gives its lines."""
    console = Console(width=width, height=height, color_system=None, force_terminal=True)
    with console.capture() as captured:
        console.print(draw(shown, "127.0.0.1:8000", trouble, width, height))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_a_wide_terminal_shows_everything() -> None:
    """The server's line, and all columns."""
    head, titles, _, row, foot = drawn(110, 20, figures("resnet"))
    assert head == ("127.0.0.1:8000  ready  1234 req/s  CPU 1.25  memory 300 MiB  connections 1 REST, 3 gRPC")
    assert titles.split() == ["servable", "version", "state", "req/s", "err/s", "busy", "queue", "p50", "p99", "memory"]
    assert row.split() == ["resnet", "1", "READY", "1234", "0.5", "7", "0", "0.25", "ms", "1.5", "s", "5.0", "MiB"]
    assert foot == "q quits"


def test_forty_columns_show_what_matters_most() -> None:
    """No line is longer, names give way last, and numbers are whole."""
    lines = drawn(40, 20, figures("a_model_with_quite_a_long_name", "b"), "no server answers; trying again")
    assert max(map(len, lines)) <= 40
    (titles,) = (line for line in lines if line.startswith("servable"))
    assert titles.split()[:3] == ["servable", "req/s", "err/s"]
    assert "no server answers; trying again" in lines
    (row,) = (line for line in lines if line.startswith("a_model"))
    assert row.split()[0].endswith("\N{HORIZONTAL ELLIPSIS}")
    assert row.split()[1:3] == ["1234", "0.5"]
    assert " 1.5 s" in row


@given(st.integers(24, 200), st.integers(12, 40), st.lists(st.text(max_size=30), max_size=60))
def test_a_terminal_of_any_size_is_never_overrun(width: int, height: int, names: list[str]) -> None:
    """Whatever servables are called; those for which there is no room are counted."""
    for shown in (figures(*names), None):
        lines = drawn(width, height, shown, "no server answers")
        assert len(lines) <= height
        assert max(map(cell_len, lines)) <= width
    lines = drawn(width, height, figures(*names))
    below = next(index for index, line in enumerate(lines) if line.startswith("\N{BOX DRAWINGS LIGHT HORIZONTAL}"))
    left_out = len(names) - len(lines[below + 1 : -1])
    assert lines[-1] == (f"{left_out} more; q quits" if left_out else "q quits")
