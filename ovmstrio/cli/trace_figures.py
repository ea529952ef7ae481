"""Figures of a running pipeline: read from the HTTP port in its ``config.yml``, and shown as tables."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ovmstrio.cli.console import echo, stdout
from ovmstrio.cli.stream_text import safe_for_terminals
from ovmstrio.cli.tables import fitted, print_table
from ovmstrio.core.errors import ConfigError
from ovmstrio.ops.config_file import validate_pipeline_config

_TRACE_PATH: Final = "/trace"
_DEFAULT_NAME: Final = "config.yml"
_STAGES: Final = ("in", "prep", "midp", "postp", "out")
_PERCENTS: Final = ("50", "90", "99")
_SHOWN: Final = (_PERCENTS, ("50", "99"), ("50",))
"""Alternatives for the percentiles of stages; the first that fits the terminal is shown."""
_ANY_WIDTH: Final = 10_000
_BAR: Final = 10

HEADER: Final = ("op", "stage", "samples", *(f"p{percent}_ms" for percent in _PERCENTS), "idle", "died")
"""Columns of :func:`rows`."""


class NoTarget(Exception):
    """The command line names no valid source of figures."""


class NoServer(Exception):
    """The server does not answer."""


class NoFigures(Exception):
    """The server has no figures of a pipeline."""


def find_url(target: str) -> str:
    """Return the address of a server: the given one, or that in a configuration file or its directory.

    Raises:
        NoTarget: there is no HTTP port in the file, or the target is neither.
    """
    path = Path(target)
    file = path / _DEFAULT_NAME if path.is_dir() else path
    if file.is_file():
        return f"http://127.0.0.1:{_http_port(file)}"
    address = target if target.startswith(("http://", "https://")) else f"http://{target}"
    try:
        port = httpx.URL(address).port
    except httpx.InvalidURL as error:
        raise NoTarget(f"{target} is neither a file nor HOST:PORT: {error}") from None
    if port is None and address.startswith("http:"):
        raise NoTarget(f"{file}: no such file; give a config.yml, its directory, or HOST:PORT of the HTTP port")
    return address.rstrip("/")


def _http_port(file: Path) -> int:
    try:
        settings = validate_pipeline_config(file).settings
    except ConfigError as error:
        raise NoTarget(str(error)) from None
    if not settings.http_port:
        raise NoTarget(f"{file}: no http_port set; give HOST:PORT of the HTTP port")
    return settings.http_port


@asynccontextmanager
async def open_source(
    url: str, patience: float, service: str = ""
) -> AsyncIterator[Callable[[], Awaitable[dict[str, Any]]]]:
    """Yield a function that reads the figures, of the named service if the server has several, with a timeout per read.

    Closes the connection at the end of the block.
    """
    path = f"/{quote(service, safe='')}{_TRACE_PATH}" if service else _TRACE_PATH
    key = os.environ.get("OVMS_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, timeout=patience, trust_env=False, headers=headers) as client:

        async def read() -> dict[str, Any]:
            """Read the current figures; raises NoServer or NoFigures."""
            try:
                answer = await client.get(path)
            except httpx.TransportError as error:
                raise NoServer(
                    f"{url} does not answer: {str(error) or type(error).__name__}; is the server running?"
                ) from None
            return _figures(answer, f"{url}{path}")

        yield read


def _figures(answer: httpx.Response, url: str) -> dict[str, Any]:
    try:
        figures = answer.json() if answer.is_success else None
    except ValueError:
        figures = None
    if not isinstance(figures, dict) or not {"ops", "requests", "channels"} <= set(figures):
        status = answer.status_code
        raise NoFigures(f"{url} has no figures of a pipeline (status {status}): is it a pipeline's HTTP port?")
    return figures


def draw(figures: Mapping[str, Any], console: Console) -> Group:
    """Draw requests, Ops and channels, one below the other, for a terminal."""
    ruler = Console(width=_ANY_WIDTH)
    tables = [_ops(figures["ops"], percents) for percents in _SHOWN]
    fitting = next((table for table in tables if ruler.measure(table).maximum <= console.width), tables[-1])
    drawn = (fitted(table, console) for table in (fitting, _channels(figures["channels"])))
    return Group(_summary(figures), *(Text(one) if isinstance(one, str) else one for one in drawn))


def print_figures(figures: Mapping[str, Any]) -> None:
    """Print the figures once; in a pipe one line for each row, with all columns."""
    console = stdout()
    if console.is_terminal:
        console.print(draw(figures, console))
        return
    echo(_summary(figures).plain)
    for table in (_ops(figures["ops"], _PERCENTS), _channels(figures["channels"])):
        print_table(table)


def rows(figures: Mapping[str, Any]) -> Iterator[Sequence[object]]:
    """Return a row for each stage of each Op; :data:`HEADER` names the columns."""
    for name, op in figures["ops"].items():
        for stage in _STAGES:
            times = op["stages"][stage]
            yield name, stage, times["count"], *(times[percent] for percent in _PERCENTS), op["idle"], op["deaths"]


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
    """Return the size of a queue, with a bar if it has a limit; red if it is full."""
    size, capacity = channel["size"], channel["capacity"]
    if not capacity:
        return Text(str(size))
    filled = min(_BAR, round(size / capacity * _BAR))
    style = "bold red" if size >= capacity else "green"
    return Text(f"{'█' * filled}{'░' * (_BAR - filled)} {size}/{capacity}", style=style)


def _batch(batches: Mapping[str, int]) -> str:
    """Return the average and the maximum size of batches."""
    count = sum(batches.values())
    if not count:
        return "-"
    average = sum(int(size) * number for size, number in batches.items()) / count
    return f"{average:.1f} (max {max(map(int, batches))})"


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.2f}" if milliseconds < 10 else f"{milliseconds:.0f}"  # noqa: PLR2004 - three digits fit
