"""View of `ovms top`: one or two lines about the server, and a table of its servables that fits the terminal."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Final

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ovmstrio.cli.console import data_table
from ovmstrio.cli.problems import safe
from ovmstrio.cli.top_figures import ServableFigures

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType

    from ovmstrio.cli.top_figures import ServerFigures

_COLOURS: Final = {"READY": "green", "LOADING": "yellow", "UNLOADING": "yellow", "UNAVAILABLE": "dim"}
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_NEXT_UNIT: Final = 1024
_THOUSAND: Final = 1000
_TEN: Final = 10
_NAMES: Final = "servable"
_LEAST_NAME: Final = 12
_GAP: Final = 1
"""Width on either side of the invisible line between columns."""


@dataclass(frozen=True, slots=True)
class _Column:
    """A column; a narrow terminal drops columns with a high ``rank`` first.

    An optional column is shown only if a servable has a value for it. Rows are sorted by ``value``.
    """

    title: str
    rank: int
    cell: Callable[[ServableFigures], str]
    value: Callable[[ServableFigures], float | str | None]
    is_optional: bool = False


_COLUMNS: Final = (
    _Column("version", 8, lambda each: each.version, lambda each: each.version),
    _Column("state", 5, lambda each: each.state, lambda each: each.state),
    _Column("req/s", 0, lambda each: _number(each.requests_per_second), lambda each: each.requests_per_second),
    _Column("err/s", 2, lambda each: _number(each.errors_per_second), lambda each: each.errors_per_second),
    _Column("busy", 3, lambda each: str(each.in_flight), lambda each: each.in_flight),
    _Column("queue", 6, lambda each: str(each.queued), lambda each: each.queued),
    _Column("p50", 4, lambda each: _time(each.p50_ms), lambda each: each.p50_ms),
    _Column("p99", 1, lambda each: _time(each.p99_ms), lambda each: each.p99_ms),
    _Column("seq", 9, lambda each: _or_empty(each.sequences), lambda each: each.sequences, is_optional=True),
    _Column(
        "tok/s",
        10,
        lambda each: _or_empty(each.tokens_per_second, _number),
        lambda each: each.tokens_per_second,
        is_optional=True,
    ),
    _Column("KV", 11, lambda each: _share(each.cache_usage), lambda each: each.cache_usage, is_optional=True),
    _Column("memory", 7, lambda each: _size(each.memory_bytes), lambda each: each.memory_bytes),
)


SORTS: Final = (_NAMES, *(column.title for column in _COLUMNS))
"""Sort keys of rows."""
BUSIEST: Final = "req/s"
_SORTED: Final = "\N{BLACK DOWN-POINTING SMALL TRIANGLE}"


def in_order(figures: ServerFigures, by: str, *, is_reversed: bool = False) -> ServerFigures:
    """Sort the rows: texts ascending, numbers descending with unknown ones last; or the reverse."""
    column = next((each for each in _COLUMNS if each.title == by), None)

    def value(each: ServableFigures) -> float | str:
        found = each.name if column is None else column.value(each)
        return found if isinstance(found, str) else -1.0 if found is None else float(found)

    texts = column is None or by in {"version", "state"}
    rows = sorted(figures.servables, key=value, reverse=texts == is_reversed)
    return replace(figures, servables=rows)


def _columns_of(servables: Sequence[ServableFigures]) -> list[_Column]:
    """Return the columns without empty optional ones."""
    return [each for each in _COLUMNS if not each.is_optional or any(map(each.cell, servables))]


def exact_table(figures: ServerFigures) -> Table:
    """Return a table of exact values for programs, with the fields of :class:`ServableFigures` as columns."""
    names = [each.name for each in fields(ServableFigures)]
    table = data_table(*names)
    for servable in figures.servables:
        values = (getattr(servable, name) for name in names)
        table.add_row(*("" if value is None else safe(str(value)) for value in values))
    return table


def figures_table(figures: ServerFigures) -> Table:
    """Return a table of all columns, without regard to the width of the terminal."""
    columns = _columns_of(figures.servables)
    table = data_table("servable", *(column.title for column in columns))
    for each in figures.servables:
        table.add_row(safe(each.name), *(safe(column.cell(each)) for column in columns))
    return table


def draw(
    figures: ServerFigures | None, address: str, trouble: str, width: int, height: int, *, by: str = ""
) -> RenderableType:
    """Draw the view, cut to the size of the terminal.

    Args:
        figures: the latest figures, None before the first ones.
        address: address of the server.
        trouble: why there are no current figures, empty if there are.
        width: columns of the terminal.
        height: lines of the terminal.
        by: the sort key, whose column is marked; empty for none.
    """
    head = Text(_shown(address), style="bold")
    if figures is not None:
        head.append_text(_server(figures))
    lines = [head]
    if trouble:
        lines.append(Text(_shown(trouble), style="red"))
    wrapped = [line for text in lines for line in text.wrap(Console(width=width), width)]
    if figures is None:
        return Group(*wrapped)
    room = max(1, height - len(wrapped) - 3)
    shown = figures.servables[:room]
    left_out = len(figures.servables) - len(shown)
    foot = Text(f"{left_out} more; " if left_out else "", style="dim").append(
        f"sorted by {by}; s sorts by the next column, r reverses; q quits" if by else "q quits"
    )
    foot.truncate(width)
    return Group(*wrapped, _fitting(shown, width, "dim" if trouble else "", by), foot)


def _server(figures: ServerFigures) -> Text:
    text = Text()
    if figures.ready is not None:
        text.append("  ready" if figures.ready else "  not ready", style="green" if figures.ready else "red")
    parts = [f"{_number(sum(each.requests_per_second for each in figures.servables))} req/s"]
    if figures.cpu is not None:
        parts.append(f"CPU {figures.cpu:.2f}")
    if figures.resident_bytes is not None:
        parts.append(f"memory {_size(figures.resident_bytes)}")
    if figures.connections:
        each = ", ".join(f"{number} {interface}" for interface, number in sorted(figures.connections.items()))
        parts.append(f"connections {each}")
    return text.append("  ").append("  ".join(parts))


def _fitting(servables: list[ServableFigures], width: int, style: str, by: str) -> Table:
    """Create a table of the columns that fit next to names of a useful length."""
    every = _columns_of(servables)
    titles = {column.title: column.title + (_SORTED if column.title == by else "") for column in every}
    cells = {column.title: [titles[column.title], *map(column.cell, servables)] for column in every}
    widths = {title: max(map(len, column)) + _GAP for title, column in cells.items()}
    names = max([cell_len(_shown(each.name)) for each in servables] + [len(_NAMES)])
    kept = sorted(every, key=lambda column: (column.title != by, column.rank))

    def left() -> int:
        return width - sum(widths[column.title] + _GAP for column in kept)

    while len(kept) > 1 and left() < min(names, _LEAST_NAME):
        kept.pop()
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False, style=style, header_style="bold")
    table.add_column(_NAMES, no_wrap=True, overflow="ellipsis", width=max(1, min(names, left())))
    columns = [column for column in every if column in kept]
    for column in columns:
        table.add_column(titles[column.title], no_wrap=True, justify="right", width=widths[column.title])
    for each in servables:
        name = Text(_shown(each.name), style="" if each.state == "READY" else _COLOURS.get(each.state, "red"))
        table.add_row(name, *(Text(column.cell(each)) for column in columns), style=style)
    return table


def _shown(text: str) -> str:
    """Replace control characters and line breaks in a text."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= _TEN or not value else f"{value:.1f}"


def _or_empty(number: float | None, shown: Callable[[float], str] = str) -> str:
    return "" if number is None else shown(number)


def _share(part: float | None) -> str:
    return "" if part is None else f"{part:.0%}"


def _time(milliseconds: float | None) -> str:
    if milliseconds is None:
        return ""
    if milliseconds >= _THOUSAND:
        return f"{milliseconds / _THOUSAND:.1f} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= _TEN else f"{milliseconds:.2g} ms"


def _size(size: int | None) -> str:
    if size is None:
        return ""
    value, unit = float(size), 0
    while value >= _NEXT_UNIT and unit < len(_UNITS) - 1:
        value, unit = value / _NEXT_UNIT, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if value >= _TEN or not unit else f"{value:.1f} {_UNITS[unit]}"
