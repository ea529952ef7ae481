"""``ovms trace`` against a server of figures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ovms_cli.trace_figures import NoFigures, find_url, open_source
from tests.support.commands import run_command
from tests.support.op_figures import op_figures
from tests.support.op_pipelines import EchoExecutor, serving_pipeline
from tests.support.plain_http import QuietHandler, answering_http
from tests.support.ports import free_ports


class _Figures(QuietHandler):
    """Answers ``/trace`` with figures of a pipeline, and other paths with other JSON."""

    def do_GET(self) -> None:  # noqa: N802 - the library's name
        body = json.dumps(op_figures() if self.path == "/trace" else {"ops": 1}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Serve figures; return host and port."""
    with answering_http(_Figures) as url:
        yield url.removeprefix("http://")


def test_figures_are_printed_once_in_every_form(address: str) -> None:
    """A line for each row with all percentiles, CSV with a row for each stage, and the JSON of the server."""
    target = ("trace", address, "--once")
    lines = run_command(*target).stdout.splitlines()
    assert next(line for line in lines if line.startswith("det")).split("  ")[0] == "det"
    assert any(line.startswith("det") and "12 / 16 / 16" in line for line in lines)
    assert any(line.startswith("chl0") for line in lines)
    rows = list(csv.DictReader(io.StringIO(run_command(*target, "--output", "csv").stdout)))
    (midp,) = (row for row in rows if (row["op"], row["stage"]) == ("det", "midp"))
    assert float(midp["p50_ms"]) == pytest.approx(12)
    assert (midp["samples"], midp["died"]) == ("4", "1")
    printed = run_command("trace", f"http://{address}/", "--once", "--json")
    assert json.loads(printed.stdout) == op_figures()


def test_a_configuration_names_the_port(address: str, tmp_path: Path) -> None:
    """The file or its folder."""
    (tmp_path / "config.yml").write_text(f"http_port: {address.rpartition(':')[2]}\n")
    for target in (tmp_path, tmp_path / "config.yml"):
        assert find_url(str(target)) == f"http://{address}"
        assert run_command("trace", str(target), "--once").exit_code == 0


@pytest.mark.parametrize(
    ("target", "code", "message"),
    [
        ("http://{address}/other", 1, "no figures of a pipeline"),
        ("127.0.0.1:{free}", 2, "is the server running?"),
        ("rpc.yml", 64, "no http_port"),
        ("wrong.yml", 64, "wrong.yml:1: "),
        ("nothing.yml", 64, "no such file"),
    ],
)
def test_failures_have_exit_codes(address: str, command_folder: Path, target: str, code: int, message: str) -> None:
    """1 is a server without figures, 2 an unreachable server, 64 a wrong target."""
    (free,) = free_ports(1)
    (command_folder / "rpc.yml").write_text("rpc_port: 9998\n")
    (command_folder / "wrong.yml").write_text("a: [")
    ended = run_command("trace", target.format(address=address, free=free), "--once")
    assert (ended.exit_code, message in " ".join(ended.output.split())) == (code, True), ended.output


async def test_figures_of_a_served_pipeline() -> None:
    """The HTTP port of a pipeline has the figures; a pipeline without figures answers 404."""
    async with (
        serving_pipeline(EchoExecutor(), snapshot=op_figures) as running,
        open_source(f"http://{running.rest[0]}", 5) as read,
    ):
        assert await read() == op_figures()
    async with serving_pipeline(EchoExecutor()) as running, open_source(f"http://{running.rest[0]}", 5) as read:
        with pytest.raises(NoFigures, match="status 404"):
            await read()
