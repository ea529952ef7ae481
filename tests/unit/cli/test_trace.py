from __future__ import annotations

import csv
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ovms_cli.all_commands import app
from ovms_cli.trace_figures import NoFigures, NoTarget, draw, find_url, open_source
from ovmstrio.runtimes.ops.observing.figures import PipelineFigures
from ovmstrio.runtimes.ops.observing.hooks import ChannelState
from ovmstrio.runtimes.ops.observing.observing import snapshot
from tests.support.op_pipelines import EchoExecutor, serving_pipeline
from tests.support.ports import free_ports


def _figures() -> dict[str, Any]:
    figures = PipelineFigures(lambda: 10.0)
    states = [ChannelState("chl0", ("@DAGExecutor",), ("det",), 3, 4), ChannelState("chl1", ("det",), ("rec",), 7)]
    figures.opened(["det", "rec\x1b[2J"], lambda: states)
    for number in range(4):
        figures.request_started(number, 0)
        figures.stage("det", 0, "midp", [number], (0.0, 0.004 * (number + 1)))
        figures.batch("det", 0, range(number + 1))
        code = 6000 if number == 3 else 0
        figures.request_finished(number, 0, code, (9.0, 9.5))
    figures.worker_died("det", 0, "killed")
    return snapshot(figures, 8)


class _Handler(BaseHTTPRequestHandler):
    """Answers with the figures, or with none where ``nothing`` is asked for."""

    def do_GET(self) -> None:
        """Answer."""
        body = json.dumps(_figures() if self.path == "/trace" else {"ops": 1}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[int]:
    """Serve figures on a port."""
    with HTTPServer(("127.0.0.1", 0), _Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield listening.server_port
        listening.shutdown()
        thread.join()


def _drawn(width: int = 160) -> str:
    console = Console(width=width, record=True, file=None, force_terminal=False)
    with console.capture() as captured:
        console.print(draw(_figures(), console))
    return captured.get()


def test_view() -> None:
    """The view has rates, each stage's percentiles, batch sizes, deaths and what waits where."""
    text = _drawn()
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
def test_narrow_terminals(width: int, heading: str, midp: str) -> None:
    """Where there is less room, fewer percentiles are shown, each Op still on one line."""
    lines = _drawn(width).splitlines()
    assert any(line.startswith("Op") and heading in line for line in lines)
    assert f" {midp}  " in next(line for line in lines if line.startswith("det"))
    assert sum("rec" in line for line in lines) == 2
    assert not any("…" in line for line in lines)


def test_a_very_narrow_terminal_has_a_block_for_each_op_and_channel() -> None:
    """With every name whole, as other tables there."""
    lines = [line.rstrip() for line in _drawn(40).splitlines()]
    assert max(map(len, lines)) <= 40
    assert [line.split() for line in lines if line.startswith(("Channel", "from", "to"))][:3] == [
        ["Channel", "chl0"],
        ["from", "@DAGExecutor"],
        ["to", "det"],
    ]
    assert ["midp", "12"] in [line.split() for line in lines]


def test_what_goes_into_a_pipe_has_a_line_for_each_row(server: int) -> None:
    """With all percentiles, however long; and as CSV a row for each stage."""
    runner = CliRunner()
    target = ["trace", f"127.0.0.1:{server}", "--once"]
    lines = runner.invoke(app, target).output.splitlines()
    assert next(line for line in lines if line.startswith("det")).split("  ")[0] == "det"
    assert any(line.startswith("det") and "12 / 16 / 16" in line for line in lines)
    rows = list(csv.DictReader(io.StringIO(runner.invoke(app, [*target, "--output", "csv"]).output)))
    (midp,) = (row for row in rows if (row["op"], row["stage"]) == ("det", "midp"))
    assert float(midp["p50_ms"]) == pytest.approx(12)
    assert (midp["samples"], midp["died"]) == ("4", "1")


def test_once(server: int) -> None:
    """The figures of now can be shown once, and as JSON for scripts."""
    runner = CliRunner()
    shown = runner.invoke(app, ["trace", f"127.0.0.1:{server}", "--once"])
    assert shown.exit_code == 0, shown.output
    assert "chl0" in shown.output
    told = runner.invoke(app, ["trace", f"http://127.0.0.1:{server}/", "--once", "--json"])
    assert json.loads(told.output) == _figures()


def test_port_of_a_configuration(server: int, tmp_path: Path) -> None:
    """A configuration file, or its directory, tells where its pipeline is served."""
    (tmp_path / "config.yml").write_text(f"http_port: {server}\n")
    for target in (tmp_path, tmp_path / "config.yml"):
        assert find_url(str(target)) == f"http://127.0.0.1:{server}"
        assert CliRunner().invoke(app, ["trace", str(target), "--once"]).exit_code == 0


def test_exit_codes(server: int, tmp_path: Path) -> None:
    """A server without figures is 1, none at all is 2, and a target that is none is 64."""
    runner = CliRunner()
    (port,) = free_ports(1)
    (tmp_path / "rpc.yml").write_text("rpc_port: 9998\n")
    (tmp_path / "wrong.yml").write_text("a: [")
    for target, code, message in (
        (f"http://127.0.0.1:{server}/other", 1, "no figures of a pipeline"),
        (f"127.0.0.1:{port}", 2, "is the server running?"),
        (str(tmp_path / "rpc.yml"), 64, "no http_port"),
        (str(tmp_path / "wrong.yml"), 64, "wrong.yml:1: "),
        ("nothing.yml", 64, "no such file"),
    ):
        ended = runner.invoke(app, ["trace", target, "--once"])
        assert (ended.exit_code, message in " ".join(ended.output.split())) == (code, True), ended.output


async def test_figures_of_a_served_pipeline() -> None:
    """What a pipeline's HTTP port tells is what the view draws; without figures that is said."""
    async with (
        serving_pipeline(EchoExecutor(), snapshot=_figures) as running,
        open_source(f"http://{running.rest[0]}", 5) as read,
    ):
        assert await read() == _figures()
    async with serving_pipeline(EchoExecutor()) as running, open_source(f"http://{running.rest[0]}", 5) as read:
        with pytest.raises(NoFigures, match="status 404"):
            await read()


def test_hosts() -> None:
    """A host with a port is taken with and without a scheme."""
    assert find_url("box:8080") == "http://box:8080"
    assert find_url("https://box/") == "https://box"
    with pytest.raises(NoTarget):
        find_url("box:port")
