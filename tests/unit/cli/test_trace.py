"""Views of ``ovms trace``."""

from __future__ import annotations

import pytest
from rich.console import Console

from ovms_cli.trace_figures import NoTarget, draw, find_url
from tests.support.op_figures import op_figures


def _drawn(width: int = 160) -> str:
    console = Console(width=width, record=True, file=None, force_terminal=False)
    with console.capture() as captured:
        console.print(draw(op_figures(), console))
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


def test_hosts() -> None:
    """A host with a port is taken with and without a scheme."""
    assert find_url("box:8080") == "http://box:8080"
    assert find_url("https://box/") == "https://box"
    with pytest.raises(NoTarget):
        find_url("box:port")
