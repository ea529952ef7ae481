"""The figures of a running pipeline as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ovms_cli.stream_text import safe_for_terminals

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["draw"]

_STAGES: Final = ("in", "prep", "midp", "postp", "out")
_PERCENTS: Final = ("50", "90", "99")
_SHOWN: Final = (_PERCENTS, ("50", "99"), ("50",))
"""Which percentiles of stages are shown, the first of these for which there is room."""
_ANY_WIDTH: Final = 10_000
_BAR: Final = 10


def draw(figures: Mapping[str, Any], width: int) -> RenderableType:
    """Draw requests, Ops and channels, one below the other, for a terminal of so many columns."""
    ruler = Console(width=_ANY_WIDTH)
    tables = [_ops(figures["ops"], percents) for percents in _SHOWN]
    fitting = next((table for table in tables if ruler.measure(table).maximum <= width), tables[-1])
    return Group(_summary(figures), fitting, _channels(figures["channels"]))


def _summary(figures: Mapping[str, Any]) -> Text:
    requests = figures["requests"]
    times = requests["latency_ms"]
    failed = sum(count for code, count in figures.get("codes", {}).items() if code != "0")
    parts = [
        f"{requests['qps']:.1f} requests/s",
        f"{figures.get('running', 0)} of {figures.get('worker_num', '?')} running",
        f"{requests['count']} answered",
        f"{failed} failed",
        f"{figures.get('left', 0)} left",
        " ".join(f"p{percent} {_ms(times[percent])}" for percent in _PERCENTS) + " ms",
    ]
    return Text(" · ".join(parts), style="bold")


def _ops(ops: Mapping[str, Any], percents: Sequence[str]) -> Table:
    """Draw a row for each Op: percentiles of each stage, in milliseconds, and its batches."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column(f"Op (ms: {' / '.join(f'p{percent}' for percent in percents)})", no_wrap=True)
    for heading in (*_STAGES, "samples", "batch", "idle", "died"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, op in ops.items():
        stages = op["stages"]
        times = [" / ".join(_ms(stages[stage][percent]) for percent in percents) for stage in _STAGES]
        count = max((stages[stage]["count"] for stage in _STAGES), default=0)
        died = Text(str(op["deaths"]), style="bold red" if op["deaths"] else "dim")
        cells = [*times, str(count), _batch(op["batches"]), f"{op['idle']:.0%}"]
        table.add_row(Text(safe_for_terminals(name), style="cyan"), *cells, died)
    return table


def _channels(channels: list[Mapping[str, Any]]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for heading in ("Channel", "from", "to", "waiting"):
        table.add_column(heading)
    for each in channels:
        ends = (", ".join(each["in"]), ", ".join(each["out"]))
        table.add_row(*(Text(safe_for_terminals(text)) for text in (each["name"], *ends)), _depth(each))
    return table


def _depth(channel: Mapping[str, Any]) -> Text:
    """Give how much waits, with a bar where it is limited, red when nothing more fits."""
    size, capacity = channel["size"], channel["capacity"]
    if not capacity:
        return Text(str(size))
    filled = min(_BAR, round(size / capacity * _BAR))
    style = "bold red" if size >= capacity else "green"
    return Text(f"{'█' * filled}{'░' * (_BAR - filled)} {size}/{capacity}", style=style)


def _batch(batches: Mapping[str, int]) -> str:
    """Give the average size of batches and the largest one."""
    count = sum(batches.values())
    if not count:
        return "-"
    average = sum(int(size) * number for size, number in batches.items()) / count
    return f"{average:.1f} (max {max(map(int, batches))})"


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.2f}" if milliseconds < 10 else f"{milliseconds:.0f}"  # noqa: PLR2004 - three digits fit
